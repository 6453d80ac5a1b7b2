"""`python -m bench`: timings, compile times, call overhead, rewrites and the operator sweep."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from bench import (
    compiletime,
    converters,
    convolutions,
    fusions,
    measure,
    native,
    opdb,
    ops,
    peers,
    plan,
    prototypes,
    report,
    rewrites,
    scale,
)
from bench import growth as sizes
from bench.models import MODELS
from bench.zoo import ZOO

model_option = click.option(
    "--model", "models", multiple=True, type=click.Choice([*MODELS, *ZOO]), help="Repeatable."
)
json_option = click.option("--json", "path", type=click.Path(dir_okay=False), help="Write here.")
zoo_option = click.option("--zoo", is_flag=True, help="Models of Hugging Face, not those of ours.")
peers_option = click.option("--peers", "chosen", help="Comma separated; default: all that apply.")
seconds_option = click.option("--seconds", default=3.0, help="Of timing, a peer and model.")


def _peers(chosen: str | None, device: str) -> list[str]:
    known = peers.names(device)
    wanted = [name.strip() for name in chosen.split(",")] if chosen else known
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"{name!r}; on {device} there are {', '.join(known)}")
    return wanted


def _time(
    models: Sequence[str],
    wanted: Sequence[str],
    setup: measure.Setup,
    path: str | None,
    together: bool = False,
) -> None:
    about = report.machine()
    report.show_machine(about)
    if setup.device == "cpu":
        # A pool of compilers for each peer's process would be more processes than processors.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    rows: list[measure.Timing] = []
    for timings in measure.measure(models, wanted, setup, _tell, together):
        rows += timings
        report.show_timings(timings[0].model, timings, setup.device)
        report.write(path, about, rows)  # after each: a long run that is cut short keeps some


def _tell(timing: measure.Timing) -> None:
    built = "built" if timing.build_s is None else f"built in {timing.build_s:.1f} s"
    state = built if timing.status == "ok" else f"{timing.status}: {timing.note}"
    click.echo(f"{timing.model} {timing.peer}: {state}", err=True)


def _everything(zoo: bool) -> list[str]:
    return list(ZOO) if zoo else [name for name in MODELS if name != "empty_function"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """torchgraft side by side with its peers, answers checked, nothing asserted about time."""


@main.command("cpu")
@model_option
@zoo_option
@peers_option
@json_option
@seconds_option
@click.option("--list", "listing", is_flag=True, help="Models and peers, then stop.")
def cpu(
    models: tuple[str, ...],
    zoo: bool,
    chosen: str | None,
    path: str | None,
    seconds: float,
    listing: bool,
) -> None:
    """One thread, float32, ranked by CPU time."""
    if listing:
        return _list("cpu")
    setup = measure.Setup("cpu", "float32", seconds)
    return _time(models or _everything(zoo), _peers(chosen, "cpu"), setup, path)


@main.command("cuda")
@model_option
@zoo_option
@peers_option
@json_option
@seconds_option
@click.option("--dtype", default="float16", type=click.Choice(["float16", "bfloat16", "float32"]))
@click.option("--together", is_flag=True, help="Build everything at once: for many processors.")
@click.option("--patience", default=600.0, show_default=True, help="Seconds to wait for a build.")
@click.option("--list", "listing", is_flag=True, help="Models and peers, then stop.")
def cuda(
    models: tuple[str, ...],
    zoo: bool,
    chosen: str | None,
    path: str | None,
    seconds: float,
    dtype: str,
    together: bool,
    patience: float,
    listing: bool,
) -> None:
    """Wall time with a synchronisation after each call, and time between CUDA events."""
    if listing:
        return _list("cuda")
    setup = measure.Setup("cuda", dtype, seconds, patience=patience)
    return _time(models or _everything(zoo), _peers(chosen, "cuda"), setup, path, together)


def _list(device: str) -> None:
    click.echo(f"models: {', '.join(MODELS)}")
    click.echo(f"zoo:    {', '.join(ZOO)}")
    click.echo(f"peers:  {', '.join(peers.names(device))}")


@main.command("overhead")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@json_option
@seconds_option
def overhead(device: str, path: str | None, seconds: float) -> None:
    """The cost of a call: x + 1 on one element, as a module and as a function."""
    wanted = ["eager", "compile", "graft", "graft-backend", "aoti", "aoti-boxed"]
    setup = measure.Setup(device, "float32", seconds)
    _time(["empty", "empty_function"], wanted, setup, path)


@main.command("compile-time")
@model_option
@click.option("--ways", default=",".join(compiletime.WAYS), show_default=True)
@click.option("--rounds", default=1, show_default=True, help="The cheapest of so many counts.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda", "offline"]))
@json_option
def compile_time(
    models: tuple[str, ...], ways: str, rounds: int, device: str, path: str | None
) -> None:
    """CPU seconds of graft.compile, and of Inductor alone on the same graph; `offline` is CUDA
    without a GPU."""
    chosen = ways.split(",")
    for way in chosen:
        if way not in compiletime.WAYS:
            raise click.BadParameter(f"{way!r}; there are {', '.join(compiletime.WAYS)}")
    about = report.machine()
    report.show_machine(about)
    names = models or ("mlp", "moe", "dlrm", "tiny_cnn", "bert")
    costs = [cost for name in names for cost in compiletime.best(name, chosen, rounds, device)]
    report.show_costs(costs)
    report.write(path, about, costs)


@main.command("table")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--into", type=click.Path(exists=True, dir_okay=False), help="Such as README.md.")
@click.option("--kind", default="cpu", type=click.Choice(["cpu", "wall", "device"]))
def table(results: tuple[str, ...], into: str | None, kind: str) -> None:
    """The README's table from files that --json wrote."""
    rows = [row for path in results for row in json.loads(Path(path).read_text())["rows"]]
    made = report.markdown(rows, kind)
    if into is None:
        click.echo(made)
    else:
        report.put(Path(into), made)


@main.command("growth")
@click.option("--nodes", multiple=True, type=int, default=sizes.SIZES, show_default=True)
@click.option("--streams", default="off", type=click.Choice(["off", "auto"]), show_default=True)
@json_option
def growth(nodes: tuple[int, ...], streams: str, path: str | None) -> None:
    """Compile time and memory by the size of the graph; a process each."""
    about = report.machine()
    report.show_machine(about)
    rows = [sizes.grow_apart(count, streams) for count in nodes]
    report.show_growth(rows)
    report.write(path, about, rows)


@main.command("threads")
@seconds_option
@json_option
def threads(seconds: float, path: str | None) -> None:
    """Calls a second of one small program from 1, 4 and 16 threads."""
    about = report.machine()
    report.show_machine(about)
    rows = [sizes.rate(count, seconds) for count in (1, 4, 16)]
    for row in rows:
        click.echo(f"{row.threads:>3} threads: {row.calls_per_s:,.0f} calls a second")
    report.write(path, about, rows)


@main.command("soak")
@click.option("--calls", default=1_000_000, show_default=True)
@json_option
def soak(calls: int, path: str | None) -> None:
    """Resident memory over many calls of one small program."""
    about = report.machine()
    report.show_machine(about)
    rows = sizes.hold(calls)
    for row in rows:
        click.echo(f"{row.calls:>10,} calls: {row.mib:.1f} MiB, {row.objects} objects")
    report.write(path, about, rows)


@main.command("opdb")
@click.option("--ops", "named", default="", help="A regular expression, searched in the full name.")
@click.option("--sample", type=int, help="So many of them.")
@click.option("--seed", default=0, show_default=True)
@click.option("--grad", is_flag=True, help="Gradients as well.")
@click.option("--mode", default="default", type=click.Choice(["default", "eager"]))
@click.option("--backend", default="torchgraft", show_default=True)
@click.option("--dtypes", default="float32,other", show_default=True)
@click.option("--samples", default=2, show_default=True, help="Sample inputs of each op.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--patience", default=180.0, help="Seconds an op may take.")
@json_option
def sweep(
    named: str,
    sample: int | None,
    seed: int,
    grad: bool,
    mode: str,
    backend: str,
    dtypes: str,
    samples: int,
    device: str,
    patience: float,
    path: str | None,
) -> None:
    """PyTorch's operator database through the backend, against eager."""
    about = report.machine()
    report.show_machine(about)
    names = opdb.operators(named, sample, seed)
    results = []
    stream = opdb.run(
        names,
        dtypes.split(","),
        patience=patience,
        mode=mode,
        grad=grad,
        backend=backend,
        samples=samples,
        device=device,
    )
    with click.progressbar(length=len(names) * len(dtypes.split(","))) as bar:
        for result in stream:
            results.append(result)
            bar.update(1)
    report.show_results(results)
    report.write(path, about, results)


@main.command("rewrites")
@click.option("--nodes", default=5000, show_default=True)
@click.option("--patterns", default=200, show_default=True)
def rewrite(nodes: int, patterns: int) -> None:
    """Patterns on a large graph, and conversion by the size of the graph."""
    rewrites.run(nodes, patterns)
    converters.run()


@main.command("converters")
def convert() -> None:
    """Conversion by the size of the graph."""
    converters.run()


@main.command("fusions")
@click.option("--only", type=click.Choice(list(fusions.CASES)))
@click.option("--seconds", default=2.0, show_default=True, help="Of timing, a fusion and mode.")
def fuse(only: str | None, seconds: float) -> None:
    """Each fusion on a module it was made for, with it and without."""
    fusions.run(only, seconds)


@main.command("convolutions")
@click.option("--seconds", default=1.0, show_default=True, help="Of timing, a shape.")
def convolve(seconds: float) -> None:
    """Convolutions on CPU by generated code and by oneDNN."""
    report.show_machine(report.machine())
    convolutions.run(seconds)


@main.command("ops")
def operators() -> None:
    """A call of an operator declared here, and of the same by hand."""
    ops.run()


@main.command("prototypes")
def load() -> None:
    """Loading 1,700 prototypes, and what the check of dtypes costs."""
    prototypes.run()


@main.command("plan")
@json_option
def plan_command(path: str | None) -> None:
    """The time to schedule and prove plans of 1,000 to 50,000 launches, 1 to 16 streams."""
    rows = [plan.measure(count, streams) for count in plan.SIZES for streams in (1, 4, 16)]
    report.show_plans(rows)
    report.write(path, report.machine(), rows)


@main.command("scale")
@click.option("--ranks", "counts", default="2,4", show_default=True, help="gloo ranks to start.")
@click.option("--mode", default="eager", type=click.Choice(["default", "eager"]))
@click.option("--paper", is_flag=True, help="Only what the model says about 8 to 1,024 GPUs.")
@json_option
def scaling(counts: str, mode: str, paper: bool, path: str | None) -> None:
    """graft.simulate against gloo ranks here, and on paper."""
    if paper:
        for name, case in scale.CASES.items():
            click.echo(f"{name}\n\n{scale.table(scale.rows(case))}\n")
        click.echo(scale.variants())
        return
    about = report.machine()
    report.show_machine(about)
    found = [scale.measure(int(count), scale.Size(mode=mode)) for count in counts.split(",")]
    report.show_scale(found)
    report.write(path, about, found)


@main.command("native")
@model_option
@json_option
def saved(models: tuple[str, ...], path: str | None) -> None:
    """Saved programs: a call in C++ and of its kernels alone, and loading the models named."""
    rows = native.run(models)
    report.write(path, report.machine(), rows)


if __name__ == "__main__":
    main(prog_name="python -m bench")
