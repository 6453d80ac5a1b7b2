"""What is no package, or not for here, is refused with a sentence; nothing of it is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgraft as graft
from torchgraft.errors import (
    BadPackage,
    BadValue,
    GraftError,
    MissingLibrary,
    WrongMachine,
)
from torchgraft.package import archive, machine
from torchgraft.package.load import opened

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small program with every part but generated code: ranges, folded weights, a state."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
            self.count.add_(1)
            return {"y": self.linear(x).reshape(-1) * scale, "n": self.count + x.shape[0]}

    path = tmp_path_factory.mktemp("package") / "program.graft"
    spec = graft.Input(min_shape=(2, 4), max_shape=(8, 4))
    graft.compile(Model(), (spec, 1.5), mode="eager").save(path)
    return path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def rewritten(path: Path, target: Path, name: str, change: Change) -> Path:
    """The package with a JSON member changed, and its hashes made anew."""
    held = members(path)
    manifest = json.loads(held.pop("manifest.json"))
    if name == "manifest.json":
        change(manifest)
    else:
        data = json.loads(held[name])
        change(data)
        held[name] = json.dumps(data).encode()
    archive.write(target, manifest, held)
    return target


def zipped(target: Path, entries: list[tuple[str, bytes]], **options: Any) -> Path:
    with zipfile.ZipFile(target, "w", **options) as file:
        for name, data in entries:
            file.writestr(name, data)
    return target


@pytest.fixture
def manifest(package: Path) -> bytes:
    return members(package)["manifest.json"]


# --- The machine ---


def requires(field: str, value: Any) -> Change:
    return lambda manifest: manifest["requires"].update({field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(torch="2.0.1"), r"it needs torch 2.0.1, here is torch 2\.\d+.*\nInst"),
        (requires("machine", "riscv64"), r"it needs a riscv64 processor, here is .*\nCompile"),
        (requires("cpu", ["avx", "avx9000"]), r"it needs a processor with .*avx9000, here is one"),
        (requires("device", "cuda"), r"it needs a CUDA device, here is none.\nRun it on"),
        (lambda m: m.update(version=1), r"its format has version 1, this torchgraft reads 2"),
        (lambda m: m.update(format="other"), r"it is not torchgraft's"),
    ],
)
def test_another_machine(package: Path, tmp_path: Path, change: Change, message: str) -> None:
    if torch.cuda.is_available() and "CUDA" in message:
        pytest.skip("there is a CUDA device here")
    path = rewritten(package, tmp_path / "m.graft", "manifest.json", change)
    with pytest.raises((WrongMachine, BadPackage), match=message):
        graft.load(path)


def test_another_gpu(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["cuda"] = "12.8"
        manifest["requires"] |= {"device": "cuda", "capability": [9, 0]}

    path = rewritten(package, tmp_path / "m.graft", "manifest.json", change)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "device_count": 2,
        "get_device_capability": (8, 6),
        "get_device_name": "Some GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    message = r"it needs compute capability 9.0, here is 8.6 \(Some GPU\).\nCompile and save it"
    with pytest.raises(WrongMachine, match=message):
        graft.load(path)
    message = r"it needs device 'cuda:2', here is cuda:0, cuda:1.\nLeave the device out"
    with pytest.raises(WrongMachine, match=message):
        graft.load(path, device="cuda:2")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(WrongMachine, match=r"it needs CUDA 12.8, here is CUDA 13.0"):
        graft.load(path)


def test_another_device(package: Path) -> None:
    with pytest.raises(WrongMachine, match="it needs device 'cpu', here is device='cuda:1'"):
        graft.load(package, device="cuda:1")
    with pytest.raises(BadValue, match="device"):
        graft.load(package, device="nowhere")
    assert graft.load(package, device="cpu").name == "Model"


def test_a_missing_operator(tmp_path: Path) -> None:
    path = tmp_path / "m.graft"
    with graft.Registry():

        @graft.op("packagetest::gone")
        def gone(x: Tensor) -> Tensor:
            return x + 1

        graft.compile(gone, (torch.ones(2),), mode="eager").save(path)
        assert graft.load(path)(torch.ones(2)).tolist() == [2, 2]
    message = r"it calls packagetest::gone.*, which no loaded library registers.\nImport the Python"
    with pytest.raises(MissingLibrary, match=message):
        graft.load(path)


def test_another_operator_library(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libmine.so"
    library.write_bytes(b"new")
    entry = {"name": "libmine.so", "sha256": hashlib.sha256(b"old").hexdigest(), "ops": []}
    monkeypatch.setattr(torch.ops, "loaded_libraries", {str(library)})
    path = rewritten(
        package, tmp_path / "m.graft", "manifest.json", lambda m: m.update(libraries=[entry])
    )
    with pytest.raises(MissingLibrary, match="is not the one it was compiled with"):
        graft.load(path)


def test_the_processor_of_this_machine_is_known() -> None:
    assert machine.cpu_sets() == tuple(sorted(set(machine.cpu_sets())))
    if Path("/proc/cpuinfo").exists():
        assert machine.cpu_sets()


# --- The file ---


def test_no_file_an_empty_one_and_something_else(tmp_path: Path) -> None:
    with pytest.raises(BadPackage, match="cannot be read"):
        graft.load(tmp_path / "nothing.graft")
    with pytest.raises(BadPackage, match="cannot be read"):
        graft.load(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(BadPackage, match="it is empty"):
        graft.load(tmp_path / "empty")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BadPackage, match="not a zip archive"):
        graft.load(tmp_path / "text")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_cut_off(package: Path, tmp_path: Path, share: float) -> None:
    data = package.read_bytes()
    (tmp_path / "m.graft").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BadPackage, match=r"m.graft: not a package .*\nCopy it again"):
        graft.load(tmp_path / "m.graft")


def test_altered(package: Path, tmp_path: Path) -> None:
    data = package.read_bytes()
    at = data.index(b'"launch"')
    (tmp_path / "m.graft").write_bytes(data[: at + 1] + b"L" + data[at + 2 :])
    with pytest.raises(BadPackage, match=r"'program.json' was altered after it was written"):
        graft.load(tmp_path / "m.graft")


def test_something_put_behind_it(package: Path, tmp_path: Path) -> None:
    other = tmp_path / "longer.graft"
    other.write_bytes(package.read_bytes() + b"x")
    with pytest.raises(BadPackage, match="something was put behind it"):
        graft.load(other)


def test_a_hash_that_was_given(package: Path) -> None:
    right = hashlib.sha256(package.read_bytes()).hexdigest()
    assert graft.load(package, sha256=right.upper()).name == "Model"
    with pytest.raises(BadPackage, match=f"its SHA-256 is {right}, not {'0' * 64}"):
        graft.load(package, sha256="0" * 64)


@pytest.mark.parametrize(
    "name", ["../evil.so", "/etc/evil", "lib/../../evil", "a\\b", "lib/", "C:evil", "x" * 999, "ü"]
)
def test_path_traversal(manifest: bytes, tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "m.graft", [("manifest.json", manifest), (name, b"evil")])
    with pytest.raises(BadPackage, match="which is no such name"):
        graft.load(path)


def test_a_zip_bomb(manifest: bytes, tmp_path: Path) -> None:
    entries = [("manifest.json", manifest), ("program.json", bytes(1 << 24))]
    path = zipped(tmp_path / "m.graft", entries, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(BadPackage, match="members must be stored"):
        graft.load(path)


def test_members_that_overlap(package: Path, tmp_path: Path) -> None:
    data = bytearray(package.read_bytes())
    at = data.rindex(b"PK\1\2")  # the last entry of the directory: say that it lies at 0
    struct.pack_into("<I", data, at + 42, 0)
    (tmp_path / "m.graft").write_bytes(data)
    with pytest.raises(BadPackage, match=r"overlaps another|not where the directory says"):
        graft.load(tmp_path / "m.graft")


def test_too_many_members(manifest: bytes, tmp_path: Path) -> None:
    entries = [("manifest.json", manifest), *((f"m{i}", b"") for i in range(4096))]
    with pytest.raises(BadPackage, match="it has 4097 members, 4096 are allowed"):
        graft.load(zipped(tmp_path / "m.graft", entries))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_twice_missing_or_unlisted(manifest: bytes, tmp_path: Path) -> None:
    twice = [("manifest.json", manifest), ("a", b""), ("a", b"")]
    with pytest.raises(BadPackage, match="there are two members 'a'"):
        graft.load(zipped(tmp_path / "m.graft", twice))
    with pytest.raises(BadPackage, match=r"the manifest and the members differ in graph.json"):
        graft.load(zipped(tmp_path / "m.graft", [("manifest.json", manifest)]))
    with pytest.raises(BadPackage, match=r"its first member is not manifest.json"):
        graft.load(zipped(tmp_path / "m.graft", [("a", b""), ("manifest.json", manifest)]))


def test_json_that_is_none(tmp_path: Path) -> None:
    for text in (b"{", b"[" * 100_000, b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\xff"):
        path = zipped(tmp_path / "m.graft", [("manifest.json", text)])
        with pytest.raises(BadPackage, match=r"'manifest.json' is not JSON"):
            graft.load(path)


# --- Content that makes no sense, with hashes that do ---


def first_step(change: Change) -> Change:
    return lambda body: change(body["programs"][0]["plan"]["steps"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("gears"), "'gears' is missing"),
        (lambda b: b.update(gears=[]), "it has no program"),
        (lambda b: b.update(mode="fastest"), "its mode is 'fastest'"),
        (lambda b: b["gears"][0].update(program=7), "7 is out of range, there are 1"),
        (lambda b: b["gears"][0].update(program=True), "not an integer"),
        (lambda b: b["gears"][0].update(states=["ghost"]), "there is no state 'ghost'"),
        (lambda b: b["weights"][0].update(tensor="ghost"), "is not among the tensors"),
        (lambda b: b["weights"][0].update(stride=[1 << 40, 1 << 40]), "strides"),
        (first_step(lambda s: s.update(launch="ghost")), "nothing says what 'ghost' is"),
        (first_step(lambda s: s.update(args=[{"b": 999}])), "b999 is used but was never written"),
        (first_step(lambda s: s.update(args=[{"os": "system"}])), "not a value"),
        (lambda b: b["prepare"]["plan"]["inputs"].pop(), "takes another number|never written"),
    ],
)
def test_nonsense(package: Path, tmp_path: Path, change: Change, message: str) -> None:
    path = rewritten(package, tmp_path / "m.graft", "program.json", change)
    with pytest.raises(BadPackage, match=message):
        graft.load(path)


def deep(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = {"t": [tree]}
    return tree


def test_a_value_nested_too_deep(package: Path, tmp_path: Path) -> None:
    change = first_step(lambda step: step.update(args=[deep(100)]))
    path = rewritten(package, tmp_path / "m.graft", "program.json", change)
    with pytest.raises(BadPackage, match="nested more than 64 deep"):
        graft.load(path)


# --- Fuzzing ---


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The file with bits flipped, pieces cut, doubled, moved, zeroed or replaced by noise."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        # The directory and the headers are small, so aim at them as well.
        start = rng.choice((rng.randrange(len(made)), len(made) - rng.randrange(1, 600)))
        at = min(max(0, start), len(made) - 1)
        size = rng.choice((1, 2, 4, 64, 1000))
        kind = rng.randrange(6)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at : at + size]
        elif kind == 2:
            made[at:at] = made[at : at + size]
        elif kind == 3:
            made[at : at + size] = bytes(len(made[at : at + size]))
        elif kind == 4:
            made[at : at + size] = rng.randbytes(len(made[at : at + size]))
        else:
            made = made[:at]
        if not made:
            break
    return bytes(made)


_LEAVES = [None, True, -1, 0, 2**31, 2**70, 1.5, 1e308, "", "x", "aten::relu", [], {}, {"b": 0}]


def scrambled(data: Any, rng: random.Random) -> Any:
    """JSON with one part replaced, dropped, doubled or exchanged with another."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        if isinstance(part, (dict, list)):
            for key in part if isinstance(part, dict) else range(len(part)):
                places.append((part, key))
                walk(part[key])

    walk(data)
    holder, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        holder[key] = rng.choice(_LEAVES)
    elif kind == 1:
        del holder[key]
    elif kind == 2:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name])) if _has(other, name) else None
    elif isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    return data


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def forged(held: dict[str, bytes], target: Path, rng: random.Random) -> bytes:
    """A package whose content was changed, with hashes that fit."""
    parts = dict(held)
    manifest = json.loads(parts.pop("manifest.json"))
    name = rng.choice(["program.json"] * 6 + ["manifest.json", "weights.safetensors"])
    if name == "manifest.json":
        manifest = scrambled(manifest, rng)
    elif name == "weights.safetensors":
        parts[name] = mutated(parts[name], rng)
    else:
        parts[name] = json.dumps(scrambled(json.loads(parts[name]), rng)).encode()
    manifest = manifest if isinstance(manifest, dict) else {}
    archive.write(target, manifest, parts)
    return target.read_bytes()


def fuzz(package: Path, folder: Path, count: int, seed: int) -> Iterator[GraftError | None]:
    """Load mutated packages: each is refused with a `GraftError`, or is as good as the first.

    A forged one is read and checked, but not started: it may well ask an operator to divide by 0.
    """
    data, held = package.read_bytes(), members(package)
    target = folder / "fuzzed.graft"
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        content = forged(held, target, rng) if i % 2 else mutated(data, rng)
        target.unlink(missing_ok=True)
        target.write_bytes(content)
        try:
            opened(target) if i % 2 else graft.load(target)
        except GraftError as error:
            yield error
        else:
            yield None


def test_mutated_packages(package: Path, tmp_path: Path) -> None:
    count = int(os.environ.get("TORCHGRAFT_FUZZ", 300))
    found = list(fuzz(package, tmp_path, count, seed=1))
    refused = [error for error in found if error is not None]
    assert len(refused) > count * 2 / 3
    assert all(str(error).count("\n") >= 1 for error in refused)  # what, and what to do


def test_the_fuzzer_keeps_the_package_readable(package: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(package.read_bytes())) as file:
        assert file.testzip() is None
