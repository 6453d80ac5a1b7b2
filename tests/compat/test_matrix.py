"""The matrices in README.md and docs/ascend.md are what the tests say."""

from __future__ import annotations

from pathlib import Path

import matrix
import names
import pytest
import signatures

from torchgraft.errors import NotOnThisDevice


def test_the_pages_have_the_tables_of_the_tests(ascend: Path) -> None:
    for path, text in matrix.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run: python tests/compat/matrix.py"


def test_every_public_name_is_there_or_refused(ascend: Path) -> None:
    found = {
        f"{module}.{name}": names.state(module, name)
        for module, listed in names.NAMES.items()
        for name in listed.split()
    }
    assert set(found.values()) == set(matrix.HOW)
    assert set(found) >= names.IDLE
    assert found["torchair.llm_datadist.create_npu_tensors"] == "refused"
    with pytest.raises(NotOnThisDevice, match=r"create_npu_tensors needs an NPU. It maps memory"):
        from torchair.llm_datadist import create_npu_tensors  # noqa: F401


def test_a_signature_is_that_of_the_real_package(ascend: Path) -> None:
    import torch_npu  # noqa: F401

    found = [
        f"{full}: {one}"
        for full, text in signatures.SIGNATURES.items()
        for one in signatures.differences(full, text)
    ]
    assert found == []


def test_every_kind_of_answer_is_shown() -> None:
    found = matrix.features()
    assert {how for _, _, how, _ in found} == set(matrix.HOW)
    assert len(found) == len(set(found))
    assert {package for package, _, _, _ in found} == set(matrix.PACKAGES)
