"""What `python -m bench` makes of its numbers, and small sizes of what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import growth, report
from bench.measure import Sample, Timing


def row(model: str, peer: str, cpu: float, status: str = "ok") -> dict[str, Any]:
    return Timing(model, peer, status, samples=[Sample(2 * cpu, cpu)] * 3).as_json()


def test_the_table_has_times_faster_than_torch_compile(tmp_path: Path) -> None:
    rows = [
        row("mlp", "compile", 40.0),
        row("mlp", "graft", 4.0),
        row("mlp", "ort", 5.0),
        row("mlp", "openvino", 1.0, "WRONG"),
        row("bert", "compile", 250e3),
        row("bert", "graft", 200e3),
        row("lonely", "graft", 1.0),
    ]
    expected = (
        "| model | torch.compile | torchgraft | eager | AOTInductor | ONNX Runtime | OpenVINO |\n"
        "|---|---|---|---|---|---|---|\n"
        "| mlp | 40 µs | **10.00** | - | - | 8.00 | - |\n"
        "| bert | 250.0 ms | **1.25** | - | - | - | - |"
    )
    assert report.markdown(rows) == expected
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    report.put(page, expected)
    assert page.read_text() == f"before\n<!-- speed -->\n{expected}\n<!-- /speed -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no <!-- speed -->"):
        report.put(page, expected)


def test_a_graph_of_a_given_size_is_compiled() -> None:
    for streams in ("off", "auto"):
        grown = growth.grow(300, streams)
        assert 250 < grown.nodes < 350
        assert grown.launches == grown.nodes  # on ATen, one each


def test_calls_from_threads_give_the_same_answer() -> None:
    assert growth.rate(4, seconds=0.05, mode="eager").calls_per_s > 0


def test_calls_leave_nothing_behind() -> None:
    held = growth.hold(2000, points=4, mode="eager")
    assert [one.calls for one in held] == [0, 500, 1000, 1500, 2000]
    assert held[-1].objects - held[1].objects < 100  # 1,500 calls later
