"""Where the real packages keep what is somewhere else here: their other module paths."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from torchgraft.compat.refused import missing

ALIASES = {
    "torchair": ("npu_export", "npu_fx_compiler", "experimental", "experimental.inference"),
    "torchair.ge": ("ge_custom",),
    "torch_npu.npu": (
        "autocast_utils",
        "deterministic",
        "graphs",
        "memory",
        "mstx",
        "npu_config",
        "random",
        "streams",
        "utils",
    ),
    "torch_npu.npu.amp": ("autocast_mode", "common", "grad_scaler"),
    "torch_npu.optim": (
        "npu_fused_adadelta",
        "npu_fused_adam",
        "npu_fused_adamp",
        "npu_fused_adamw",
        "npu_fused_bert_adam",
        "npu_fused_lamb",
        "npu_fused_optim_base",
        "npu_fused_rmsprop",
        "npu_fused_rmsprop_tf",
        "npu_fused_sgd",
    ),
    "torch_npu.profiler": ("experimental_config", "profiler", "profiler_interface", "scheduler"),
    "torch_npu.distributed": ("distributed_c10d",),
    "torch_npu.contrib.module": (
        "activations",
        "bidirectional_lstm",
        "channel_shuffle",
        "crossentropy",
        "deform_conv",
        "drop_path",
        "ensemble_dropout",
        "focus",
        "linear_a8w8_quant",
        "linear_quant",
        "linear_weight_quant",
        "multihead_attention",
        "npu_modules",
        "prefetcher",
        "ps_roi_pooling",
        "quant_conv2d",
        "roi_align",
    ),
    "torch_npu.contrib.function": (
        "anchor_generator",
        "bbox_coder",
        "fuse_add_softmax_dropout",
        "fused_attention",
        "index_op",
        "matmul_transpose",
        "nms",
        "npu_functional",
        "roll",
    ),
    "torch_npu.utils": ("serialization",),
}
"""By the module that has their names here: paths below it."""

REFUSED = {
    "torch_npu.jit": "Use torch.jit, and torch_aie.compile or graft.compile for the result.",
    "torch_npu.asd": "There is no chip here to watch. Use torch.isfinite.",
    "torch_npu.onnx": "Use torch.onnx.",
    "torch_npu.profiler.dynamic_profile": "Use torch_npu.profiler.profile with a schedule.",
    "torch_npu.distributed.rpc": "Use torch.distributed.rpc.",
    "torch_npu.distributed.run": "Use torchrun.",
    "torch_npu.npu.aclnn": "Its kernels are the NPU's. Use torch.nn.functional.",
    "torch_npu.npu.backends": "Use torch.backends.",
    "torch_npu.testing.common_distributed": "Use torch.multiprocessing.spawn and backend='hccl'.",
    "torch_npu.testing.common_methods_invocations": "Use torch.testing's op_db.",
    "torch_npu.testing.decorator": "Use pytest.mark.parametrize, or unittest's subTest.",
    "torch_npu.utils.collect_env": "Use torch.utils.collect_env, or torchgraft doctor.",
    "torch_npu.utils.combine_tensors": "Use torch.cat of the flattened tensors.",
    "torch_npu.utils.profiler": "Use torch_npu.profiler.profile.",
    "torch_npu.utils.syncbatchnorm": "Use torch.nn.SyncBatchNorm.",
    "torch_npu.utils.tensor_methods": "Use torch_npu.npu_dtype_cast and its siblings.",
}
"""Modules of which nothing is here, with the nearest that works."""
_BELOW = {
    "torch_npu.jit": ("fusion_pass", "fusion_pass.fast_gelu", "register_fusion_pattern"),
    "torch_npu.distributed.rpc": ("options",),
    "torch_npu.npu.aclnn": ("backends",),
}


class Refusing(ModuleType):
    """A module each name of which is refused."""

    def __init__(self, name: str, nearest: str) -> None:
        super().__init__(name, f"Not here: {nearest}")
        self.__dict__["_nearest"] = nearest

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise missing(f"{self.__name__}.{name}", self._nearest)


def activate(package: str) -> None:
    """Make the other paths of a package importable."""
    for name, nearest in REFUSED.items():
        if name.startswith(f"{package}."):
            refusing = Refusing(name, nearest)
            for full in (name, *(f"{name}.{below}" for below in _BELOW.get(name, ()))):
                _put(full, refusing)
    for owner, names in ALIASES.items():
        if owner == package or owner.startswith(f"{package}."):
            module = importlib.import_module(owner)
            for name in names:
                _put(f"{owner}.{name}", module)


def _put(full: str, module: ModuleType) -> None:
    """Under a path; as an attribute, too, where the owner has not something else of that name."""
    sys.modules[full] = module
    owner, _, last = full.rpartition(".")
    held = sys.modules.get(owner)
    if held is not None and not hasattr(held, last):
        setattr(held, last, module)
