"""Kernels of a module behind one call: what is joined, what is not, and where memory lies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import torchgraft as graft
from torchgraft._torch import entry

MODULE = """
class Runner:
    def call(self, args):
        x, = args
        args.clear()
        assert_size_stride(x, (4, ), (1, ), 'input')
        buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
        buf1 = reinterpret_tensor(buf0, (2, ), (1, ), 2)
        cpp_a(x, weight, buf1)
        del x
        {middle}
        buf2 = empty_strided_cpu((2, 2), (2, 1), torch.int64)
        cpp_b(buf1, buf2)
        del buf0
        return (reinterpret_tensor(buf2, (4, ), (1, ), 0), weight, None, )
"""
KERNELS = {
    "cpp_a": ["const float*", "const float*", "float*"],
    "cpp_b": ["const float*", "int64_t*"],
}


def test_what_is_written() -> None:
    found = entry.read(MODULE.format(middle="del buf1"), KERNELS)
    assert found is not None
    assert found.text.splitlines() == [
        "def _joined(args):",
        "    try:",
        "        _joined_memory = _joined_pool.pop()",
        "    except IndexError:",
        "        _joined_memory = empty_strided_cpu((16,), (1,), torch.uint8)",
        "    x, = args",
        "    args.clear()",
        "    assert_size_stride(x, (4,), (1,), 'input')",
        "    buf2 = empty_strided_cpu((2, 2), (2, 1), torch.int64)",
        "    _joined_run0(_joined_kernels, _joined_memory, x, weight, buf2)",
        "    del x",
        "    _joined_pool.append(_joined_memory)",
        "    return (reinterpret_tensor(buf2, (4,), (1,), 0), weight, None)",
    ]
    [run] = found.runs
    assert run.types == ("int64_t", *["uint8_t*"] * 4)
    assert run.source.splitlines()[1:] == [
        'extern "C" void kernel(int64_t at, '
        "uint8_t* arg0, uint8_t* arg1, uint8_t* arg2, uint8_t* arg3)",
        "{",
        "    const auto kernels = reinterpret_cast<const uintptr_t*>(at);",
        "    reinterpret_cast<void (*)(uint8_t*, uint8_t*, uint8_t*)>(kernels[0])"
        "(arg1 + 0, arg2 + 0, arg0 + 0 + 8);",
        "    reinterpret_cast<void (*)(uint8_t*, uint8_t*)>(kernels[1])(arg0 + 0 + 8, arg3 + 0);",
        "}",
    ]


APART = [
    "extern_kernels.mm(buf1, buf1, out=buf0)",
    "buf7 = torch.ops.demo.op.default(buf1)",
    "cpp_a(buf1, 3, buf1)",
    "assert_size_stride(buf1, (2, ), (1, ))",
    "assert not buf1.isnan().any().item()",
    "cpp_c(buf1)",
]


@pytest.mark.parametrize("middle", APART)
def test_what_others_see_is_memory_of_its_own(middle: str) -> None:
    text = MODULE.format(middle=middle + "; cpp_b(buf1, x)\n        cpp_b(x, x)")
    found = entry.read(text, KERNELS)
    assert found is not None
    lines = [line.strip() for line in found.text.splitlines()]
    apart = "buf0 = empty_strided_cpu((4,), (1,), torch.float32)"
    assert lines.index(apart) < lines.index("_joined_run0(_joined_kernels, x, weight, buf1)")
    assert entry.ast.unparse(entry.ast.parse(middle)) in lines
    assert "_joined_memory" not in found.text
    assert [len(run.calls) for run in found.runs] == [1, 3]


def test_sizes_that_are_symbols_stay() -> None:
    middle = "buf7 = empty_strided_cpu((s0, ), (1, ), torch.float32); cpp_b(buf7, buf7)"
    found = entry.read(MODULE.format(middle=middle), KERNELS)
    assert found is not None
    assert "buf7 = empty_strided_cpu((s0,), (1,), torch.float32)" in found.text
    assert "_joined_run1(_joined_kernels, _joined_memory, buf7, buf2)" in found.text


def test_what_is_called_otherwise_by_then() -> None:
    """A name that is gone is not asked for what another one still has."""
    text = MODULE.format(middle="buf3 = buf9; del buf9").replace(
        "cpp_b(buf1, buf2)", "cpp_b(buf3, buf2)"
    )
    found = entry.read(text.replace("cpp_a(x, weight", "cpp_a(buf9, weight"), KERNELS)
    assert found is not None
    assert "_joined_run0(_joined_kernels, _joined_memory, buf9, weight, buf3, buf2)" in found.text


def test_nothing_to_join() -> None:
    assert (
        entry.read("def call(args):\n    x, = args\n    cpp_b(x, x)\n    return (x, )", KERNELS)
        is None
    )
    assert entry.read("def calls(args):\n    return ()", KERNELS) is None


def test_much_memory_is_not_kept() -> None:
    middle = "buf7 = empty_strided_cpu(({}, ), (1, ), torch.float32); cpp_b(buf7, buf1)"
    for more, kept in ((-64, True), (64, False)):
        found = entry.read(MODULE.format(middle=middle.format(entry.KEPT // 4 + more)), KERNELS)
        assert found is not None
        assert ("_joined_pool" in found.text) == kept


@given(st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1)), max_size=9))
def test_what_is_alive_at_once_does_not_overlap(buffers: list[tuple[int, list[int]]]) -> None:
    lines = ["def call(args):", "x, = args"]
    lines += [
        f"b{i} = empty_strided_cpu(({n}, ), (1, ), torch.int32)" for i, (n, _) in _each(buffers)
    ]
    held = [[f"b{i}" for i, (_, uses) in _each(buffers) if k in uses] for k in range(10)]
    lines += [f"cpp_{k}({', '.join(['x', *names])})" for k, names in enumerate(held)]
    kernels = {f"cpp_{k}": ["int32_t*"] * (1 + len(names)) for k, names in enumerate(held)}
    found = entry.read("\n    ".join([*lines, "return (x, )"]), kernels)
    assert found is not None
    totals = list(map(int, re.findall(r"\(\((\d+),\)", found.text)))
    total = totals[0] if totals else 0
    [run] = found.runs
    places = [[int(one.split(" + ")[1]) for one in given[1:]] for _, given in run.calls]
    at = {
        name: p
        for names, ps in zip(held, places, strict=True)
        for name, p in zip(names, ps, strict=True)
    }
    spans = {f"b{i}": (at[f"b{i}"], at[f"b{i}"] + 4 * n) for i, (n, _) in _each(buffers)}
    lives = {f"b{i}": (min(uses), max(uses)) for i, (_, uses) in _each(buffers)}
    for one in spans:
        assert spans[one][0] % 64 == 0
        assert spans[one][1] <= total
        for other in spans:
            if one < other and _meet(lives[one], lives[other], 0):
                assert not _meet(spans[one], spans[other], 1)


def _each(values: list[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(values))


def _meet(one: tuple[int, int], other: tuple[int, int], gap: int) -> bool:
    return one[0] <= other[1] - gap and other[0] <= one[1] - gap


@pytest.fixture
def scopes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Namespaces of the modules that got one call, their own kernels taken away."""
    done: list[dict[str, Any]] = []
    define = entry.Entry.define

    def told(self: entry.Entry, scope: dict[str, Any], *functions: Any) -> None:
        define(self, scope, *functions)
        for name in [name for name in scope if name.startswith("cpp_")]:
            del scope[name]
        done.append(scope)

    monkeypatch.setattr(entry.Entry, "define", told)
    with fresh_cache():
        yield done


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24), nn.Tanh()).eval()


def test_layers_are_one_call(scopes: list[dict[str, Any]]) -> None:
    model = layers()
    compiled = graft.compile(model, (torch.randn(1, 24),))
    assert len(scopes) == 1
    inputs = [torch.randn(1, 24) for _ in range(8)]
    for x in inputs:
        torch.testing.assert_close(compiled(x), model(x))
    with ThreadPoolExecutor(4) as pool:
        for x, y in zip(inputs * 25, pool.map(compiled, inputs * 25), strict=True):
            torch.testing.assert_close(y, model(x))


def test_new_weights_are_read(scopes: list[dict[str, Any]]) -> None:
    model = layers()
    compiled = graft.compile(model, (torch.randn(1, 24),))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    compiled.load_state_dict(model.state_dict())
    x = torch.randn(1, 24)
    torch.testing.assert_close(compiled(x), model(x))
    assert scopes


def test_outputs_are_memory_of_their_own(scopes: list[dict[str, Any]]) -> None:
    first, second = layers(), layers()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.first(x)
            return y, y[:, 3:9], self.second(y + x)

    model = Two()
    compiled = graft.compile(model, (torch.randn(1, 24),))
    assert len(scopes) == 1
    x, other = torch.randn(1, 24), torch.randn(1, 24)
    kept = compiled(x)
    compiled(other)
    torch.testing.assert_close(kept, model(x))


def test_sizes_that_are_not_known(scopes: list[dict[str, Any]]) -> None:
    model = layers()
    compiled = graft.compile(model, (graft.Input(min_shape=(1, 24), max_shape=(8, 24)),))
    for rows in (1, 5, 8):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(compiled(x), model(x))
    assert not scopes


def test_what_a_library_computes_lies_between_runs(scopes: list[dict[str, Any]]) -> None:
    model, x = layers(), torch.randn(8, 24)

    def between(x: Tensor) -> Tensor:
        y = model(x)
        values, _ = y.cos().flatten().sort()
        return (values + 1).exp() * 2

    compiled = graft.compile(between, (x,))
    torch.testing.assert_close(compiled(x), between(x))
    [scope] = scopes
    assert "_joined_run1" in scope
    for _ in range(3):
        other = torch.randn(8, 24)
        torch.testing.assert_close(compiled(other), between(other))
