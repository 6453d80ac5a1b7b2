"""The Ray examples on a Ray of this machine: batches with a worker that is killed, and serving."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import torchgraft as graft

ray = pytest.importorskip("ray", reason="torchgraft[ray] is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "ray"
PATIENCE = 600.0
"""Seconds: for a machine with much else to do."""


def example(name: str) -> ModuleType:
    """An example as a module that is in no path: Ray then sends its classes by value."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    from ray import serve

    ray.init(
        num_cpus=2,
        object_store_memory=200 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))


@pytest.fixture(scope="module")
def program(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ray") / "model.graft"
    gears = graft.Input(gears=[(1, 4), (4, 4), (8, 4)])
    graft.compile(model, (gears,), mode="eager").save(path)
    return str(path)


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)


def test_a_killed_worker_is_replaced_and_no_row_is_lost_or_doubled(
    model: torch.nn.Module, program: str, tmp_path: pathlib.Path
) -> None:
    loaded, killed = tmp_path / "loaded", tmp_path / "killed"
    loaded.mkdir()

    class Worker(graft.Rows):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            (loaded / str(os.getpid())).touch(exist_ok=False)  # once in a process

        def __call__(self, batch: Any) -> Any:
            made = super().__call__(batch)
            if 57 in batch["id"] and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return made

    values = rows(100)
    given = ray.data.from_items(
        [{"id": i, "input": values[i]} for i in range(100)], override_num_blocks=5
    )
    found = example("batch").infer(given, program, workers=2, batch_size=6, worker=Worker)
    found.write_parquet(str(tmp_path / "results"))

    assert killed.exists()
    assert len(list(loaded.iterdir())) >= 2  # the one that died, and the one in its place
    taken = ray.data.read_parquet(str(tmp_path / "results")).take_all()
    assert sorted(row["id"] for row in taken) == list(range(100))
    with torch.no_grad():
        want = model(torch.from_numpy(values)).numpy()
    for row in taken:
        np.testing.assert_allclose(row["output"], want[row["id"]], rtol=1e-5, atol=1e-6)


def test_requests_that_arrive_together_run_as_one_batch_and_a_wrong_one_alone_fails(
    model: torch.nn.Module, program: str
) -> None:
    from ray import serve

    serve.start(proxy_location="Disabled")
    # A batch begins when it is full: nothing here depends on how fast the requests arrive.
    app = example("serve").Model.bind(program, most=8, wait=PATIENCE)
    handle = serve.run(app)
    values = rows(16)
    answers = [handle.ask.remote(value.tolist()) for value in values[:7]]
    wrong = handle.ask.remote([1.0, 2.0])
    answers += [handle.ask.remote(value.tolist()) for value in values[7:]]
    made = np.stack([answer.result(timeout_s=PATIENCE) for answer in answers])
    with pytest.raises(ValueError, match=r"expected numbers of shape \(4,\), got \(2,\)"):
        wrong.result(timeout_s=PATIENCE)
    with torch.no_grad():
        want = model(torch.from_numpy(values)).numpy()
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-6)
    assert handle.sizes.remote().result(timeout_s=PATIENCE) == {8: 2}
