"""What is public in an Ascend package and needs the device, with the nearest that works."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from typing import NoReturn

from torchgraft.errors import NotOnThisDevice

REFUSED = {
    "torchair.llm_datadist.create_npu_tensors": "It maps memory of a data-transfer engine. "
    'Use torch.empty(..., device="npu").',
    "torchair.npu_format_cast_via_cpu": "Formats private to the NPU do not exist here. "
    "Use the tensor as it is.",
    "torchair.ops.npu_fused_infer_attention_score_v2": "Use "
    "torchair.ops.npu_fused_infer_attention_score.",
    "torchair.tools.gegraph_check.align_trace.align_trace_json": "It reads traces of NPUs. "
    "compiled.report has what ran and why.",
    "torchair.tools.gegraph_check.deadlock_check.deadlock_check": "It reads traces of NPUs. "
    "Every plan is proved free of races and deadlocks when it is made.",
    "torchair.tools.gegraph_check.filter_operators.filter_comm_ops": "It reads traces of NPUs. "
    "compiled.report has what ran and why.",
    "torch_npu.contrib.module": "Its layers are torch.nn's, in other words.",
    "torch_npu.contrib.function": "Use torch.nn.functional, or torchvision.ops.",
    **dict.fromkeys(
        ("torch_npu.optim.NpuFusedAdamP", "torch_npu.optim.NpuFusedLamb"),
        "Use torch_npu.optim.NpuFusedAdamW.",
    ),
    "torch_npu.optim.NpuFusedBertAdam": "Use torch_npu.optim.NpuFusedAdamW and a scheduler of "
    "torch.optim.lr_scheduler.",
    "torch_npu.optim.NpuFusedRMSpropTF": "Use torch_npu.optim.NpuFusedRMSprop.",
    "torch_npu.optim.NpuFusedOptimizerBase": "Derive from torch.optim.Optimizer.",
    "torch_npu.distributed.reinit_process_group": "Use destroy_process_group, then "
    "init_process_group.",
    "torch_npu.distributed.reduce_scatter_tensor_uneven": "Use torch.distributed.reduce_scatter.",
    "torch_npu.distributed.all_gather_into_tensor_uneven": "Use torch.distributed.all_gather.",
    **dict.fromkeys(
        ("torch_npu.distributed.ParallelStore", "torch_npu.distributed.ParallelTcpStore"),
        "Use torch.distributed.TCPStore.",
    ),
    **dict.fromkeys(
        (
            "torch_npu.utils.npu_combine_tensors",
            "torch_npu.utils.get_part_combined_tensor",
            "torch_npu.utils.is_combined_tensor_valid",
        ),
        "Use torch.cat of the flattened tensors.",
    ),
    "torch_npu.utils.FlopsCounter": "Use torch.utils.flop_counter.FlopCounterMode.",
    "torch_npu.testing.common_utils.check_operators_in_prof": "Look at prof.events().",
    **dict.fromkeys(
        (
            "torch_npu.testing.common_utils.iter_indices",
            "torch_npu.testing.common_utils.Baseline",
            "torch_npu.testing.common_utils.dump_baseline",
            "torch_npu.testing.common_utils.get_cycles_per_ms",
            "torch_npu.testing.common_utils.SkipIfNoLapack",
            "torch_npu.testing.common_utils.SkipIfNotRegistered",
            "torch_npu.testing.common_utils.test_2args_broadcast",
        ),
        "Use torch.testing, or pytest.",
    ),
    "torch_npu.empty_with_swapped_memory": "Use torch.empty(..., pin_memory=True).",
    "torch.ops.aie": "Its fused operators are kernels of the NPU. Declare yours with @graft.op, or "
    "use torch.nn.functional.",
}

_COLLECTIVE = "Use torch.matmul and torch.distributed; graft.compile overlaps them."
_SDPA = "Use torch_npu.npu_fused_infer_attention_score, or scaled_dot_product_attention."
_DISPATCH = "Use torch.distributed.all_to_all_single and torch_npu.npu_moe_re_routing."
_STEPS = "Use torch_npu.npu_grouped_matmul, then "
_CACHE = "Use npu_rms_norm, npu_interleave_rope and npu_scatter_nd_update_ of torch_npu."
FUSED = {
    "npu_fusion_attention_v2": "Use torch_npu.npu_fusion_attention.",
    "npu_fused_infer_attention_score_v2": "Use torch_npu.npu_fused_infer_attention_score.",
    "_npu_paged_attention": _SDPA,
    "_npu_flash_attention": _SDPA,
    "_npu_flash_attention_qlens": _SDPA,
    "npu_mla_prolog": _CACHE,
    "npu_mla_prolog_v2": _CACHE,
    "npu_kv_rmsnorm_rope_cache": _CACHE,
    "npu_ffn": "Use torch.nn.functional.linear and its activation.",
    "npu_grouped_matmul_swiglu_quant": f"{_STEPS}torch_npu.npu_dequant_swiglu_quant.",
    "npu_grouped_matmul_finalize_routing": f"{_STEPS}torch_npu.npu_moe_finalize_routing.",
    "npu_moe_distribute_dispatch": _DISPATCH,
    "npu_moe_distribute_dispatch_v2": _DISPATCH,
    "npu_moe_distribute_combine": _DISPATCH,
    "npu_moe_distribute_combine_v2": _DISPATCH,
    "npu_trans_quant_param": "Pass the scales as floats.",
    "npu_convert_weight_to_int4pack": "Use weights of int8.",
    "npu_change_data_ptr": "Use x.set_(other).",
    "npu_mm_all_reduce_base": _COLLECTIVE,
    "npu_all_gather_base_mm": _COLLECTIVE,
    "npu_mm_reduce_scatter_base": _COLLECTIVE,
}
"""Fused operators of `torch_npu` that are not in `compat.fused`, with what computes the same."""


class Missing(NotOnThisDevice, AttributeError):
    """So that `hasattr(torch_npu, name)` is an answer: libraries ask for operators that way."""


class NotImportable(NotOnThisDevice, ImportError):
    """So that `except ImportError` is an answer: libraries ask for modules that way. What Python
    makes of an AttributeError at an import would not say why."""


for _kind in (Missing, NotImportable):
    _kind.__name__ = _kind.__qualname__ = NotOnThisDevice.__name__  # what a traceback shows
    _kind.__module__ = NotOnThisDevice.__module__


def missing(full: str, nearest: str) -> NotOnThisDevice:
    """What the `__getattr__` of a module raises for a name that is known and not here."""
    return (NotImportable if _is_import() else Missing)(full, nearest)


def refuse(module: str, name: str) -> NoReturn:
    """For a module's `__getattr__`: `NotOnThisDevice` where the name is known, else as usual."""
    full = f"{module}.{name}"
    if full in REFUSED:
        raise missing(full, REFUSED[full])
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _is_import() -> bool:
    """Whether a module is asked by `from module import name`: by the import system, for a package,
    or by the statement itself."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_HOME) and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "_handle_fromlist":
        return True
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


_HOME = str(Path(__file__).parent)
