"""Decorators that choose tests by device: every one runs where there is no NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SupportedDevices"]


class SupportedDevices:
    """Of a test: the NPUs it is for."""

    def __init__(self, supported_device_name_list: list[str]) -> None:
        self.supported_device_name_list = supported_device_name_list

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn
