"""Kernels of one module are built several at a time, and are the kernels that they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache

import torchgraft as graft
from torchgraft._torch.together import MANY, together

SOURCE = """
#include <cstdint>
#include <cstddef>
static int64_t helper() {{ return {add}; }}
extern "C" void kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{
    for (int64_t i = 0; i < ks0; ++i) out_ptr0[i] = in_ptr0[i] + helper();
}}
"""
TYPES = ["const float*", "float*", "const int64_t"]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that the compiler was called for, headers left out."""
    done: list[str] = []
    build = CppBuilder.build

    def counted(self: Any) -> None:
        target = str(self.get_target_file_path())
        if target.endswith(".main.so"):  # others ask what the processor can do
            done.append(target)
        build(self)

    monkeypatch.setattr(CppBuilder, "build", counted)
    with fresh_cache():
        yield done


def ask(sources: list[str]) -> list[Any]:
    """What a generated module does."""
    scope: dict[str, Any] = {}
    with together():
        compiler = AsyncCompile()
        for i, source in enumerate(sources):
            scope[f"cpp_{i}"] = compiler.cpp_pybinding(TYPES, source)
        compiler.wait(scope)
    return list(scope.values())


def run(kernel: Any) -> float:
    x, y = torch.ones(3), torch.zeros(3)
    kernel(x, y, 3)
    [value] = set(y.tolist())
    return float(value)


def test_one_compiler_builds_several_kernels(builds: list[str]) -> None:
    kernels = ask([SOURCE.format(add=i) for i in range(4)])
    assert [run(kernel) for kernel in kernels] == [1, 2, 3, 4]
    assert len(builds) == 1
    assert [run(kernel) for kernel in ask([SOURCE.format(add=i) for i in range(4)])] == [1, 2, 3, 4]
    assert len(builds) == 1


def test_a_source_has_an_end(builds: list[str]) -> None:
    kernels = ask([SOURCE.format(add=i) for i in range(MANY + 1)])
    assert [run(kernel) for kernel in kernels] == [i + 1 for i in range(MANY + 1)]
    assert len(builds) > 1


def test_a_kernel_with_macros_is_built_alone(builds: list[str]) -> None:
    own = "#define helper() 40\n" + SOURCE.format(add=0).replace(
        "static int64_t helper()", "auto f()"
    )
    kernels = ask([SOURCE.format(add=1), own, SOURCE.format(add=2)])
    assert [run(kernel) for kernel in kernels] == [2, 41, 3]
    assert len(builds) == 2


def test_a_kernel_that_does_not_compile_raises_what_it_raised(builds: list[str]) -> None:
    with pytest.raises(CppCompileError, match="no_such_type"):
        ask([SOURCE.format(add=1), SOURCE.format(add=2) + "no_such_type x;"])


def test_other_threads_compile_as_they_did(builds: list[str]) -> None:
    asked: list[Any] = []
    with together():
        thread = threading.Thread(
            target=lambda: asked.append(AsyncCompile().cpp_pybinding(TYPES, SOURCE.format(add=5)))
        )
        thread.start()
        thread.join()
        [kernel] = asked
        assert run(kernel.result() if hasattr(kernel, "result") else kernel) == 6


def test_a_region_with_library_calls_between_its_kernels(builds: list[str]) -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x.sin() @ x.cos()).relu() / 8
        return x

    x = torch.randn(64, 64)
    compiled = graft.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(builds) == 1
