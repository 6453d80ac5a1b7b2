"""A saved program behind Ray Serve: requests that arrive together run as one batch, in a gear.

    python examples/ray/serve.py model.graft
    curl -d '[0.1, 0.2, 0.3, 0.4]' localhost:8000

Serve collects requests and spreads them over replicas; `graft.Rows` fills a batch up to the next
gear that the program was compiled for, so that every batch meets code made for its size.
"""

from __future__ import annotations

import asyncio
import collections

import click
import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import torchgraft as graft


@serve.deployment(max_ongoing_requests=256)  # Serve's own limit is less than a full batch
class Model:
    """One replica: a program with one input, loaded once."""

    def __init__(self, program: str, most: int = 8, wait: float = 0.01) -> None:
        self.rows = graft.Rows(program)
        self.batches: collections.Counter[int] = collections.Counter()
        self.infer.set_max_batch_size(most)
        self.infer.set_batch_wait_timeout_s(wait)

    @serve.batch
    async def infer(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Each row's result; called with one row, run with all that are waiting."""
        self.batches[len(rows)] += 1
        made = await asyncio.to_thread(self.rows, {"input": np.stack(rows)})
        return list(made["output"])

    async def ask(self, values: object) -> list[float]:
        """One request. It is checked before it joins others, which would fail with it."""
        row, want = np.asarray(values, dtype=np.float32), self.rows.inputs["input"]
        if row.shape != want:
            raise ValueError(f"expected numbers of shape {want}, got {row.shape}")
        return (await self.infer(row)).tolist()

    async def __call__(self, request: Request) -> Response:
        try:
            return JSONResponse(await self.ask(await request.json()))
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    def sizes(self) -> dict[int, int]:
        """How many batches there were of each size."""
        return dict(self.batches)


@click.command()
@click.argument("program")
@click.option("--most", default=8, show_default=True, help="Requests in a batch: the largest gear.")
@click.option("--wait", default=0.01, show_default=True, help="Seconds to wait for a full batch.")
@click.option("--replicas", default=1, show_default=True)
def main(program: str, most: int, wait: float, replicas: int) -> None:
    """Serve PROGRAM on port 8000 until interrupted."""
    app = Model.options(num_replicas=replicas).bind(program, most, wait)
    serve.run(app, blocking=True)


if __name__ == "__main__":
    main()
