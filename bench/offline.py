"""What compiling for CUDA costs, where there is no GPU: `compile-time --device offline`.

Inductor can write Triton for tensors of the CPU, and Triton (`pip install triton`) compiles it for
a device that is only described. So everything until the first generated kernel runs is done as for
an H200: capture, passes, code, each configuration of each kernel. Left out is what a GPU does: to
time those configurations, and the capture of a CUDA graph; and small layers in one kernel, which
are compiled when they first run.

Convolutions are the CPU's here: what is compiled is CUDA's for models without any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


class Reached(BaseException):
    """A generated kernel is to run: all is compiled. No `except Exception` is to take it."""


@dataclasses.dataclass
class Count:
    kernels: int = 0
    configurations: int = 0

    def clear(self) -> None:
        self.kernels = self.configurations = 0

    def __str__(self) -> str:
        return f"{self.kernels} kernels, {self.configurations} configurations"


class _Driver:
    """What Triton asks of a device before it compiles."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def until_kernels(go: Callable[[], object]) -> Callable[[], None]:
    """`go` up to the first generated kernel."""

    def reach() -> None:
        with contextlib.suppress(Reached):
            go()

    return reach


def install() -> Count:
    """In this process, from now on: code for the CPU is Triton's for an H200, and does not run."""
    from torch._inductor import config
    from torch._inductor.runtime import hints, triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    importlib.import_module("triton.runtime").driver.set_active(_Driver())
    torch.backends.mkldnn.enabled = False
    config.cpu_backend = "triton"
    config.cpp.weight_prepack = False
    device = hints.DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    count = Count()
    compile_all, compile_one = CachingAutotuner.precompile, CachingAutotuner._precompile_config

    def precompile(self: Any, *args: Any, **kwargs: Any) -> None:
        count.kernels += 1
        compile_all(self, *args, **kwargs)

    def precompile_config(self: Any, one: Any) -> Any:
        count.configurations += 1
        return compile_one(self, one)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Reached

    patches: list[tuple[Any, str, Any]] = [
        (hints.DeviceProperties, "create", staticmethod(lambda _: device)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (CachingAutotuner, "precompile", precompile),
        (CachingAutotuner, "_precompile_config", precompile_config),
        (CachingAutotuner, "_make_launchers", lambda self: None),
        (CachingAutotuner, "_dynamic_scale_rblock", lambda self: None),  # asks the loaded code
        (CachingAutotuner, "run", run),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
    _ours()
    return count


def _ours() -> None:
    """torchgraft decides as it does for CUDA."""
    from torchgraft import link
    from torchgraft._torch import generator
    from torchgraft.codegen import chain, decide, inductor, own, single, spread, stacks
    from torchgraft.passes import merge

    def for_cuda(gm: Any, config: Any, report: Any, known: Any) -> Any:
        report.device = "cuda"
        try:
            return decide.decide(gm, config, report, known)
        finally:
            report.device = "cpu"

    def attention(
        write: Any, q: Any, k: Any, v: Any, *args: Any, attn_mask: Any = None, **kw: Any
    ) -> Any:
        return masked(write, q, k, v, *args, attn_bias=attn_mask, **kw)

    masked = single._attends("dropout_p", "is_causal")
    single._WAYS[aten._scaled_dot_product_flash_attention_for_cpu.default] = attention
    merge.SMALL["cpu"] = merge.SMALL["cuda"]
    patches: list[tuple[Any, str, Any]] = [
        (link, "decide", for_cuda),
        (spread, "wanted", lambda *_: False),  # streams are for CUDA's own tensors
        (chain.as_one, "__defaults__", ("cpu",)),
        (single.as_loops, "__defaults__", ("cpu",)),
        (stacks, "as_rows", lambda gm: None),
        (inductor, "_by_generator", lambda products: False),
        (generator, "vendor", lambda: ""),
        (inductor, "by_onednn", lambda gm: False),
        (own, "is_ahead", lambda *vendors: False),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
