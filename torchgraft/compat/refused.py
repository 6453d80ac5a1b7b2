"""What is public in an Ascend package and needs the device, with the nearest that works."""

from __future__ import annotations

from typing import NoReturn

from torchgraft.errors import NotOnThisDevice

REFUSED = {
    "torchair.llm_datadist.create_npu_tensors": "It maps memory of a data-transfer engine. "
    'Use torch.empty(..., device="npu").',
    "torchair.npu_format_cast_via_cpu": "Formats private to the NPU do not exist here. "
    "Use the tensor as it is.",
    "torchair.ops.npu_fused_infer_attention_score": "Use "
    "torch.nn.functional.scaled_dot_product_attention; graft.fusions finds attention in a graph.",
    "torchair.ops.npu_fused_infer_attention_score_v2": "Use "
    "torch.nn.functional.scaled_dot_product_attention; graft.fusions finds attention in a graph.",
    "torchair.tools.gegraph_check.align_trace.align_trace_json": "It reads traces of NPUs. "
    "compiled.report has what ran and why.",
    "torchair.tools.gegraph_check.deadlock_check.deadlock_check": "It reads traces of NPUs. "
    "Every plan is proved free of races and deadlocks when it is made.",
    "torchair.tools.gegraph_check.filter_operators.filter_comm_ops": "It reads traces of NPUs. "
    "compiled.report has what ran and why.",
    "torch.ops.aie": "Its fused operators are kernels of the NPU. Declare yours with @graft.op, or "
    "use torch.nn.functional.",
}


def refuse(module: str, name: str) -> NoReturn:
    """For a module's `__getattr__`: `NotOnThisDevice` where the name is known, else as usual."""
    full = f"{module}.{name}"
    if full in REFUSED:
        raise NotOnThisDevice(full, REFUSED[full])
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
