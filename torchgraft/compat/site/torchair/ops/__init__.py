from typing import Any

import torch

from torchgraft.compat import fused, refused
from torchgraft.compat.air.ops import (
    npu_create_tagged_event,
    npu_print,
    npu_record_tagged_stream,
    npu_tagged_event_record,
    npu_tagged_event_wait,
    record,
    wait,
)

__all__ = [
    "npu_create_tagged_event",
    "npu_fused_infer_attention_score",
    "npu_print",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
    "record",
    "wait",
]

fused.declare()
npu_fused_infer_attention_score = torch.ops.npu.npu_fused_infer_attention_score


def __getattr__(name: str) -> Any:
    return refused.refuse("torchair.ops", name)
