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

FUSED = {
    "npu_fusion_attention": "Use torch.nn.functional.scaled_dot_product_attention.",
    "npu_prompt_flash_attention": "Use torch.nn.functional.scaled_dot_product_attention.",
    "npu_incre_flash_attention": "Use torch.nn.functional.scaled_dot_product_attention.",
    "npu_fused_infer_attention_score": "Use torch.nn.functional.scaled_dot_product_attention.",
    "npu_rms_norm": "Use torch.nn.functional.rms_norm, which gives the first of its results.",
    "npu_add_rms_norm": "Use torch.nn.functional.rms_norm on the sum.",
    "npu_rotary_mul": "Use x * cos + rotate_half(x) * sin.",
    "npu_swiglu": "Use torch.nn.functional.silu(a) * b on the halves of its input.",
    "npu_geglu": "Use torch.nn.functional.gelu(a) * b on the halves of its input.",
    "fast_gelu": "Use torch.nn.functional.gelu(x, approximate='tanh').",
    "npu_linear": "Use torch.nn.functional.linear.",
    "npu_bmmV2": "Use torch.bmm.",
    "npu_dtype_cast": "Use x.to(dtype).",
}
"""Fused operators of `torch_npu`, with what computes the same."""


def refuse(module: str, name: str) -> NoReturn:
    """For a module's `__getattr__`: `NotOnThisDevice` where the name is known, else as usual."""
    full = f"{module}.{name}"
    if full in REFUSED:
        raise NotOnThisDevice(full, REFUSED[full])
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
