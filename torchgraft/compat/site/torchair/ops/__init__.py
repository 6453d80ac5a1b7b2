from typing import Any

from torchgraft.compat import refused
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
    "npu_print",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
    "record",
    "wait",
]


def __getattr__(name: str) -> Any:
    return refused.refuse("torchair.ops", name)
