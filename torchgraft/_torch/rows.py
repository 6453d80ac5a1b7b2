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
    from torch._inductor.codegen import cpp, cpp_gemm_template, cpp_micro_gemm, cpp_template_kernel
    from torch._inductor.codegen.common import KernelTemplate

    original = cpp_micro_gemm.create_micro_gemm
    template, parse = _readers()

    def create(name: str, m: Any, n: Any, *args: Any, **kwargs: Any) -> Any:
        return _fit(original(name, m, n, *args, **kwargs), m, n)

    with (
        mock.patch.object(cpp_gemm_template, "create_micro_gemm", create),
        mock.patch.object(KernelTemplate, "_template_from_string", staticmethod(template)),
        mock.patch.object(cpp_template_kernel, "parse_expr", parse),
        mock.patch.object(cpp, _FUSES, _same_dims(getattr(cpp, _FUSES))),
    ):
        yield


_FUSES = "template_fusion_with_epilogues_supported"


def _same_dims(supported: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
    """Nothing becomes part of a batched product that sees it in other dimensions, such as heads
    that are joined: Inductor (to 2.13) would find no code for the region then."""
    from torch._inductor.codegen.cpp_bmm_template import CppBmmTemplate

    def fuses(template: Any, epilogues: list[Any]) -> tuple[bool, bool]:
        product = template.node
        if isinstance(getattr(product, "template", None), CppBmmTemplate):
            nodes = [n.node for one in epilogues for n in one.get_nodes() if n.node is not None]
            if any(len(node.get_size()) != len(product.get_size()) for node in nodes):
                return False, False
        return supported(template, epilogues)

    return fuses


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
