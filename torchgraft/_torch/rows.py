"""Generated products, with less for Inductor and the C++ compiler to do. torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def fitted() -> Iterator[None]:
    """Generated products have inner loops for the blocks of rows that occur, and no others, and no
    more columns than there are.

    Inductor writes one for each number of rows up to a block's (8, say) and lets the loop around
    them choose, also where the number is known: most of what the C++ compiler gets is never run.
    And it reads the same templates and sizes, which are texts, anew for each product.
    """
    from torch._inductor.codegen import cpp_gemm_template, cpp_micro_gemm, cpp_template_kernel
    from torch._inductor.codegen.common import KernelTemplate

    original = cpp_micro_gemm.create_micro_gemm
    template, parse = _readers()

    def create(name: str, m: Any, n: Any, *args: Any, **kwargs: Any) -> Any:
        return _fit(original(name, m, n, *args, **kwargs), m, n)

    with (
        mock.patch.object(cpp_gemm_template, "create_micro_gemm", create),
        mock.patch.object(KernelTemplate, "_template_from_string", staticmethod(template)),
        mock.patch.object(cpp_template_kernel, "parse_expr", parse),
        mock.patch.object(cpp_gemm_template, _VIEW, _each(getattr(cpp_gemm_template, _VIEW))),
    ):
        yield


_VIEW = "gen_2d_view_of_epilogue_buf"


def _each(view: Callable[..., Any]) -> Callable[..., Any]:
    """What is part of a product sees its numbers as its own size has them, each by itself.

    Inductor (to 2.13) looks at the last only: where that has the product's size, and one before it
    another, such as what normalises rows of all batches, it finds no code for the region.
    """

    def views(last: Any, product: Any, nodes: Any, found: Any, default_reindexers: Any) -> Any:
        defaults = default_reindexers or [None] * len(nodes)
        for node, default in zip(nodes, defaults, strict=True):
            last, _ = view(node, product, [node], found, [default])
        return last, found

    return views


def _fit(gemm: Any, m: Any, n: Any) -> Any:
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmFP32Vec

    if type(gemm) is not CppMicroGemmFP32Vec or not all(map(_is_known, (m, n))):
        return gemm
    rows, blocking = int(m), gemm.register_blocking
    block = max(1, min(rows, blocking.block_m))
    rest = [rows % block] if rows % block else []
    # 27 columns are two vectors and not three: 8 rows of three spill, and took three times as long.
    wide = min(blocking.block_n, max(1, -(-int(n) // _LANES)) * _LANES)
    gemm.register_blocking = blocking._replace(block_m=block, block_n=wide)
    # Of this one alone. Rows that it did not foresee would be an error of the generated code.
    gemm.TEMPLATE_ENTRY = gemm.TEMPLATE_ENTRY.replace("range(block_m - 1, 0, -1)", str(rest))
    return gemm


_LANES = 16  # a multiple of every processor's


def _is_known(size: Any) -> bool:
    return bool(getattr(size, "is_number", isinstance(size, int)))


@functools.cache
def _readers() -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """Templates and sizes by their texts, each read once in a process."""
    from sympy.parsing.sympy_parser import parse_expr  # type: ignore[import-untyped]
    from torch._inductor.codegen.common import KernelTemplate

    kept = functools.lru_cache(maxsize=1024)
    return kept(KernelTemplate._template_from_string), kept(parse_expr)
