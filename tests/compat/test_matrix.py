"""The matrix in docs/ascend.md is what the tests say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("matrix", Path(__file__).with_name("matrix.py"))
assert spec is not None
assert spec.loader is not None
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)


def test_the_page_has_the_table_of_the_tests() -> None:
    written = matrix.PAGE.read_text(encoding="utf-8")
    assert written == matrix.page(), "run: python tests/compat/matrix.py"


def test_every_kind_of_answer_is_shown() -> None:
    found = matrix.features()
    assert {how for _, _, how, _ in found} == set(matrix.HOW)
    assert len(found) == len(set(found))
    assert {package for package, _, _, _ in found} == {
        "torchgraft",
        "torchair",
        "npugraph_ex",
        "torch_aie",
        "mindietorch",
        "torch_npu",
    }
