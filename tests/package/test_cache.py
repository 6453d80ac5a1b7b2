"""The compile cache: when it hits, when it must not, what it says, and what it survives."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.testing import assert_close

import torchgraft as graft
from torchgraft.errors import BadPackage
from torchgraft.package.archive import WEIGHTS, Archive
from torchgraft.package.fingerprint import Unknowable, fingerprint

aten = torch.ops.aten
X = torch.linspace(-2, 3, 4)


def note(compiled: graft.Compiled) -> str:
    return compiled.report.notes[-1]


def compiled(folder: Path, model: Any = None, **fields: Any) -> graft.Compiled:
    fn = model or (lambda x: x.relu() * 2)
    return graft.compile(fn, (X,), mode="eager", cache_dir=folder, **fields)


def test_the_second_time_it_is_found(tmp_path: Path) -> None:
    first, second = compiled(tmp_path), compiled(tmp_path)
    assert note(first) == "cache miss: the cache is empty"
    assert note(second) == "cache hit: nothing was compiled"
    assert_close(second(X), X.relu() * 2)
    assert second.plan == first.plan
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_generated_code_is_found_and_inductors_settings_stay(tmp_path: Path) -> None:
    before = inductor.save_config_portable()["aot_inductor.metadata"]  # a part of the key
    first, second = (graft.compile(scaled(2.0), (X,), cache_dir=tmp_path) for _ in range(2))
    assert note(first) == "cache miss: the cache is empty"
    assert note(second) == "cache hit: nothing was compiled"
    assert_close(second(X), X * 2)
    assert inductor.aot_inductor.metadata == before


def scaled(by: float) -> Any:
    def fn(x: Tensor) -> Tensor:
        return x * by

    return fn


def test_a_scalar_argument_is_part_of_the_key(tmp_path: Path) -> None:
    assert_close(compiled(tmp_path, scaled(2.0))(X), X * 2)
    second = compiled(tmp_path, scaled(3.0))
    assert_close(second(X), X * 3)
    assert "graph: 0: mul changed from" in note(second)


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + 1


def test_a_method_body_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_close(compiled(tmp_path, Method())(X), X + 1)
    monkeypatch.setattr(Method, "body", lambda self, x: x - 1)
    assert_close(compiled(tmp_path, Method())(X), X - 1)


FACTOR = 2.0


def helper(value: float) -> float:
    return value * FACTOR


def scale_all(gm: Any, example_inputs: Any, config: Any) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        node.args = (node.args[0], helper(node.args[1]))


def test_what_a_pass_reaches_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[Tensor, str]:
        made = compiled(tmp_path, scaled(1.5), post_passes=[scale_all])
        return made(X), note(made)

    assert_close(run()[0], X * 3)
    assert run()[1].startswith("cache hit")
    monkeypatch.setitem(globals(), "FACTOR", 4.0)  # a global of a function that it calls
    result, why = run()
    assert_close(result, X * 6)
    assert "scale_all changed" in why
    monkeypatch.setitem(globals(), "helper", lambda value: value + 1.0)
    assert_close(run()[0], X * 2.5)


class Pass:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def new_value(self, old: float) -> float:
        return old * self.factor

    def __call__(self, gm: Any, example_inputs: Any, config: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            node.args = (node.args[0], self.new_value(node.args[1]))


def test_the_state_and_the_methods_of_a_pass_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(factor: float) -> Tensor:
        return compiled(tmp_path, scaled(1.0), post_passes=[Pass(factor)])(X)

    assert_close(run(2.0), X * 2)
    assert_close(run(3.0), X * 3)
    monkeypatch.setattr(Pass, "new_value", lambda self, old: old + 9.0)
    assert_close(run(3.0), X * 10)


def test_a_registered_pattern_and_a_converter_are_part_of_the_key(tmp_path: Path) -> None:
    def run(by: float) -> Tensor:
        with graft.Registry():

            @graft.converter(aten.relu.default)
            def relu(net: graft.Net, x: graft.Value) -> graft.Value:
                return net.add("aten::mul", x, by)

            return compiled(tmp_path)(X)

    assert_close(run(3.0), X * 6)
    assert_close(run(4.0), X * 8)
    with graft.Registry():

        @graft.pattern
        def twice(x: Tensor, n: float) -> Tensor:
            return torch.relu(x) * n

        @twice.replace
        def _(m: graft.Match) -> Tensor:
            return torch.sin(m.x)

        assert_close(compiled(tmp_path)(X), X.sin())


@pytest.mark.parametrize(
    ("change", "part"),
    [({"torch_executed_ops": ["aten::relu"]}, "config"), ({"freeze": False}, "config")],
)
def test_settings_are_part_of_the_key(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    compiled(tmp_path)
    assert f"differs in {part}: " in note(compiled(tmp_path, **change))


def test_frozen_weights_are_part_of_the_key_and_others_are_not(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    compiled(tmp_path, model)
    with torch.no_grad():
        model.weight.add_(1)
    changed = compiled(tmp_path, model)
    assert "weights: weight changed" in note(changed)
    assert_close(changed(X), model(X))
    compiled(tmp_path, model, freeze=False)
    with torch.no_grad():
        model.weight.add_(1)
    live = compiled(tmp_path, model, freeze=False)
    assert note(live).startswith("cache hit")
    with torch.no_grad():
        model.weight.mul_(3)
    assert_close(live(X), model(X))  # it reads the module's own


def test_explain_miss_compiles_nothing(tmp_path: Path) -> None:
    fields = {"mode": "eager", "cache_dir": tmp_path}
    assert graft.explain_miss(scaled(2.0), (X,), **fields) == "the cache is empty"
    compiled(tmp_path, scaled(2.0))
    assert graft.explain_miss(scaled(2.0), (X,), **fields) == "it is in the cache"
    assert "mul changed from" in graft.explain_miss(scaled(3.0), (X,), **fields)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_entry_is_replaced(tmp_path: Path) -> None:
    compiled(tmp_path)
    [entry] = tmp_path.iterdir()
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    second = compiled(tmp_path)
    assert "the entry was no good" in note(second)
    assert_close(second(X), X.relu() * 2)
    assert note(compiled(tmp_path)).startswith("cache hit")


def spoil(entry: Path, tensor: str = "") -> None:
    """Change a byte of a tensor, or else the last one of the weights."""
    data, weights = bytearray(entry.read_bytes()), bytes(Archive(entry).members[WEIGHTS])
    header = int.from_bytes(weights[:8], "little")
    listed = json.loads(weights[8 : 8 + header])
    at = 8 + header + listed[tensor]["data_offsets"][0] if tensor else len(weights) - 1
    data[data.index(weights) + at] ^= 1
    entry.write_bytes(data)


def test_altered_weights_are_never_used(tmp_path: Path) -> None:
    model = nn.Linear(4, 16)
    compiled(tmp_path, model)
    [entry] = tmp_path.iterdir()
    spoil(entry)
    found = compiled(tmp_path, model)
    assert note(found).startswith("cache hit")  # the key has the weights, so the model's are it
    assert_close(found(X), model(X))
    for use in (lambda: found.save(tmp_path / "copy"), lambda: graft.load(entry)):
        with pytest.raises(BadPackage, match=r"'weights\.safetensors' was altered"):
            use()
    found.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert_close(found(X), nn.functional.linear(X, model.weight + 1, model.bias + 1))


def add_ones(gm: Any, example_inputs: Any, config: Any) -> None:
    gm.register_buffer("ones", torch.ones(4))
    [node] = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    with gm.graph.inserting_after(node):
        one = gm.graph.get_attr("ones")
        with gm.graph.inserting_after(one):
            more = gm.graph.call_function(aten.add.Tensor, (node, one))
    node.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)


def test_an_altered_constant_that_only_the_file_has_is_refused(tmp_path: Path) -> None:
    compiled(tmp_path, post_passes=[add_ones])
    again = compiled(tmp_path, post_passes=[add_ones])
    assert note(again).startswith("cache hit")
    assert_close(again(X), (X.relu() + 1) * 2)
    [entry] = tmp_path.iterdir()
    spoil(entry)
    replaced = compiled(tmp_path, post_passes=[add_ones])
    assert "the entry was no good" in note(replaced)
    assert_close(replaced(X), (X.relu() + 1) * 2)


def test_a_constant_that_only_the_file_has_is_checked_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled(tmp_path, model, post_passes=[add_ones])
    [entry] = tmp_path.iterdir()
    spoil(entry, "0.weight")
    found = compiled(tmp_path, model, post_passes=[add_ones])
    assert note(found).startswith("cache hit")
    assert_close(found(X), model(X) + 1)
    spoil(entry, "constant.0")
    replaced = compiled(tmp_path, model, post_passes=[add_ones])
    assert "the entry was no good" in note(replaced)
    assert "'constant.0' was altered" in note(replaced)
    assert_close(replaced(X), model(X) + 1)


def test_an_entry_under_the_name_of_another_is_replaced(tmp_path: Path) -> None:
    compiled(tmp_path, scaled(2.0))
    [two] = tmp_path.iterdir()
    compiled(tmp_path, scaled(3.0))
    [three] = set(tmp_path.iterdir()) - {two}
    three.write_bytes(two.read_bytes())
    found = compiled(tmp_path, scaled(3.0))
    assert "the entry was no good: " in note(found)
    assert_close(found(X), X * 3)


class Lent(nn.Module):
    """Weights that share memory, lie in a part of it, or overlap; and a large one."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.linspace(-1, 1, 24)
        self.register_buffer("part", whole[3:19].view(4, 4).t())
        self.register_buffer("last", whole[20:])
        self.register_buffer("wide", torch.tensor([3.0]).expand(4))
        self.register_buffer("large", torch.linspace(0, 1, 1 << 17))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x @ self.part, self.last + x, self.wide * x, self.large


@pytest.mark.parametrize("mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_what_is_done_to_the_model_later_does_not_reach_a_hit(tmp_path: Path, mode: str) -> None:
    model = Lent()
    expected = [value.clone() for value in model(X)]
    for kind in ("cache miss", "cache hit"):
        found = graft.compile(model, (X,), mode=mode, cache_dir=tmp_path)
        assert note(found).startswith(kind)
        held = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for buffer in (model.part, model.last, model.wide[:1], model.large):
            buffer.fill_(7)
        assert_close(found(X), tuple(expected))
        for name, buffer in model.named_buffers():
            buffer[:1].copy_(held[name][:1]) if name == "wide" else buffer.copy_(held[name])


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    sizes = []
    for by in (1.5, 2.5, 3.5):
        compiled(tmp_path, scaled(by))
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
        for path in tmp_path.iterdir():  # the clock of the file system is coarse
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    compiled(tmp_path, scaled(1.5))  # used just now
    compiled(tmp_path, scaled(4.5), cache_bytes=sizes[1] + 200)
    left = [
        graft.explain_miss(scaled(by), (X,), mode="eager", cache_dir=tmp_path)
        for by in (1.5, 2.5, 3.5, 4.5)
    ]
    assert [text == "it is in the cache" for text in left] == [True, False, False, True]


def test_what_cannot_be_told_apart_is_not_cached(tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()

    def locked(gm: Any, example_inputs: Any, config: Any) -> None:
        with lock:
            pass

    made = compiled(tmp_path, post_passes=[locked])
    assert note(made).startswith("not cached: ")
    assert_close(made(X), X.relu() * 2)
    assert not list(tmp_path.iterdir())


def _worker(folder: str, start: Any) -> None:
    start.wait()
    for by in (1.5, 2.5):
        assert_close(compiled(Path(folder), scaled(by))(X), X * by)


def test_several_processes_write_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if not torch.cuda.is_initialized() else "spawn")
    start = context.Event()
    workers = [
        context.Process(target=_worker, args=(str(tmp_path), start), daemon=True) for _ in range(3)
    ]  # one that hangs is not waited for when the tests are over
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 2


def test_fingerprints_see_behaviour_and_not_layout() -> None:
    def version(source: str) -> Any:
        scope: dict[str, Any] = {}
        exec(source, scope)
        return scope["f"]

    plain = fingerprint(version("def f(x):\n    return x + 1\n"))
    assert fingerprint(version("\n\ndef f(x):\n    # why\n    return x + 1\n")) == plain
    assert fingerprint(version("def f(x):\n    return x + 2\n")) != plain
    assert fingerprint(version("def f(x, y=1):\n    return x + 1\n")) != plain
    assert fingerprint([1, 2]) != fingerprint([2, 1])
    assert fingerprint({1, 2}) == fingerprint({2, 1})
    assert fingerprint(1) != fingerprint(1.0) != fingerprint(True)
    assert fingerprint(torch.ones(2)) != fingerprint(torch.zeros(2))
    with pytest.raises(Unknowable):
        fingerprint(iter([1]))
