"""Programs over several gloo ranks, started by torchrun: one start for many checks."""

from __future__ import annotations

import ast
import functools
import json
import pathlib

import pytest
import torch
from distributed.launch import PROGRAMS, results, torchrun

from torchgraft.native import driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]
STARTED = {"compute": 2, "agree": 2, "mesh": 4}


def checks(program: str) -> list[str]:
    """The checks of a program, as they are written in it."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    return [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Starts a program once, and remembers what its ranks wrote."""

    @functools.cache
    def start(program: str) -> tuple[str, list[dict[str, str]]]:
        out = tmp_path_factory.mktemp(program)
        if program == "agree":
            driver.build("runtime")  # which may take minutes, so not while the ranks are waited for
        printed = torchrun(program, STARTED[program], out)
        return printed, results(out, STARTED[program])

    return start


@pytest.mark.parametrize(
    ("program", "check"), [(program, check) for program in STARTED for check in checks(program)]
)
def test_check(started: object, program: str, check: str) -> None:
    printed, ranks = started(program)  # type: ignore[operator]
    assert [rank.get(check, "not run") for rank in ranks] == ["ok"] * len(ranks), printed


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    out: pathlib.Path = tmp_path_factory.mktemp("fail")
    printed = torchrun("fail", 2, out)
    assert (out / "said.json").exists(), printed
    found: dict[str, dict[str, object]] = json.loads((out / "said.json").read_text())
    return found


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("never comes", "rank 1 did not come to it within 3 s"),
        ("stalls", "there is no word from rank 1 ("),
        ("dies", "rank 1"),
    ],
)
def test_a_rank_that_fails_is_named(said: dict[str, dict[str, object]], how: str, why: str) -> None:
    found = said[how]
    assert found["guilty"] == [1]
    assert str(found["why"]).startswith(why) or how == "dies"
    assert f"all_reduce of f32[4] in group {how!r} (step 4 of the plan) at " in str(
        found["message"]
    )
    assert "fail.py" in str(found["line"])
