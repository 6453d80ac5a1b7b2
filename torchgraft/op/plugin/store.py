"""What was built, in a folder: a manifest, copies of what was read, and libraries.

A library is built again when its source, a header that the source includes, what it registers,
torch, the compiler or its flags change; otherwise it stays.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchgraft.errors import BadFile, BadPrototype, KernelBuild, UnsupportedFile
from torchgraft.op import cpp, guard
from torchgraft.op.declare import declare
from torchgraft.op.header import read_header
from torchgraft.op.msopgen import read_msopgen
from torchgraft.op.plugin import native
from torchgraft.op.plugin.companions import read_atb, read_deprecated
from torchgraft.op.plugin.derivatives import Derivatives, read_derivatives
from torchgraft.op.plugin.functions import Entry, Functions, read_functions
from torchgraft.op.plugin.wire import NPU, resolve
from torchgraft.op.prototype import Note, Parsed

FOLDER = ".torchgraft"
FORMAT = 3
COMPANIONS = ("derivatives", "deprecated", "atb_ops")
"""Kinds of YAML files that go with functions, by how their names begin."""
KEPT = ("functions", *COMPANIONS, "prototypes", "modules")
"""Kinds of files that are kept as they are."""
_FIX = "Build it again: torchgraft op-plugin."


@dataclasses.dataclass(frozen=True)
class Source:
    """A file that was read: the name that messages give it, and its content."""

    name: str
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8-sig", errors="replace")


@dataclasses.dataclass(frozen=True)
class Read:
    """Everything that some files declare."""

    entries: dict[str, Entry]
    derivatives: Derivatives
    deprecated: dict[str, str]
    parsed: tuple[tuple[str, Parsed], ...]
    notes: tuple[Note, ...]
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Built:
    """What `build` did: the libraries that it compiled and those that were good as they were."""

    folder: Path
    compiled: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[Note, ...]
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What `load` declared: ops under `npu::`, those of them that are Python API, prototypes."""

    ops: tuple[str, ...]
    exposed: tuple[str, ...]
    prototypes: tuple[str, ...]


def build(
    files: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str] = FOLDER,
    *,
    keep_going: bool = False,
    version: str | None = None,
) -> Built:
    """Read the files, compile the C++ kernels that changed, and keep all of it in the folder.

    Files are functions (`.yaml`) and their companions (`derivatives*.yaml`, `deprecated*.yaml`,
    `atb_ops*.yaml`; those beside a functions file are found), kernels (`.cpp`, `.cc`;
    `.py`, which is run when it is loaded) and prototypes (`.h`, `.json`). When one has an entry
    that cannot be read, nothing is kept, unless `keep_going`.
    """
    version = version or "v{}.{}".format(*torch.__version__.split(".")[:2])
    groups = _grouped([Path(file) for file in files])
    home = Path(folder)
    sources = {kind: [_source(path) for path in paths] for kind, paths in groups.items()}
    found = read(sources, version)
    if found.problems and not keep_going:
        named = [source.name for source in sources["functions"]] or ["the files"]
        raise BadFile(", ".join(named), found.problems, "--keep-going")
    (home / "files").mkdir(parents=True, exist_ok=True)
    old = _old(home)
    made = native.implementations(
        {str(path): path.read_bytes() for path in groups["kernels"]}, found.entries.values()
    )
    if groups["kernels"]:  # a compiler is at hand, so prototypes are checked in C++, too
        guard.compiled(build=True)
    libraries: list[dict[str, Any]] = []
    compiled: list[str] = []
    kept: list[str] = []
    for path in groups["kernels"]:
        row, fresh = _library(home, path, made[str(path)], old)
        libraries.append(row)
        (compiled if fresh else kept).append(str(path))
    rows = {kind: [_copy(home, source) for source in sources[kind]] for kind in KEPT}
    manifest = {
        "format": FORMAT,
        "version": version,
        "torch": torch.__version__,
        "keep_going": keep_going,
        **rows,
        "libraries": libraries,
    }
    _write(home / "manifest.json", json.dumps(manifest, indent=2).encode() + b"\n")
    _sweep(home, manifest)
    return Built(home, tuple(compiled), tuple(kept), found.notes, found.problems)


def load(folder: str | os.PathLike[str] = FOLDER) -> Loaded:
    """Declare the operators that `build` kept in a folder. Loading it again changes nothing."""
    home = Path(folder)
    manifest = _manifest(home)
    sources = {kind: [_kept(home, row) for row in manifest[kind]] for kind in KEPT}
    found = read(sources, manifest["version"])
    if found.problems and not manifest["keep_going"]:
        raise BadFile(str(home), found.problems, "--keep-going")
    if manifest["libraries"] and manifest["torch"] != torch.__version__:
        why = f"its libraries are for torch {manifest['torch']}, and this is {torch.__version__}."
        raise UnsupportedFile(home, why, _FIX)
    for path, parsed in found.parsed:
        declare(parsed, path, True)
    for entry in found.entries.values():
        NPU.check(entry)
    for entry in found.entries.values():
        NPU.define(entry)
    for row in manifest["libraries"]:
        _open(home, row)
    for row in manifest["modules"]:
        _run(home, row)
    for entry in found.entries.values():
        NPU.wire(entry, resolve(entry, found.entries))
    for derivative in found.derivatives.found:
        NPU.derive(derivative, found.entries[derivative.name])
    for name, instead in found.deprecated.items():
        NPU.deprecate(name, instead)
    exposed = tuple(one.name for one in found.entries.values() if one.exposed)
    declared = tuple(one.name for _, parsed in found.parsed for one in parsed.prototypes)
    return Loaded(tuple(found.entries), exposed, declared)


def read(sources: Mapping[str, Sequence[Source]], version: str) -> Read:
    """What the sources declare, what has no effect here, and what is wrong with them."""
    entries: dict[str, Entry] = {}
    notes: list[Note] = []
    problems: list[str] = []
    for source in sources["functions"]:
        functions: Functions = read_functions(source.text, source.name, version)
        notes += functions.notes
        problems += functions.problems
        for entry in functions.entries:
            first = entries.setdefault(entry.name, entry)
            if first.schema != entry.schema:
                expected = f"{first.schema}, as at {first.where}"
                problems.append(str(BadPrototype(entry.where, entry.schema, expected)))
    formulas: list[Any] = []
    for source in sources["derivatives"]:
        derived = read_derivatives(source.text, source.name, version, entries)
        notes += derived.notes
        problems += derived.problems
        formulas += derived.found
    deprecated: dict[str, str] = {}
    for source in sources["deprecated"]:
        names, said, wrong = read_deprecated(source.text, source.name, entries)
        deprecated |= names
        notes += said
        problems += wrong
    for source in sources["atb_ops"]:
        said, wrong = read_atb(source.text, source.name)
        notes += said
        problems += wrong
    parsed = []
    for source in sources["prototypes"]:
        suffix = Path(source.name).suffix
        reader = read_msopgen if suffix == ".json" else read_header
        parsed.append((source.name, reader(f"{source.text}\n", where=source.name)))
        problems += [one.line() for one in parsed[-1][1].skipped if one.malformed]
        notes += [
            Note(one.name, one.where, f"skipped: {one.why}")
            for one in parsed[-1][1].skipped
            if not one.malformed
        ]
    derivatives = Derivatives(tuple(formulas))
    return Read(entries, derivatives, deprecated, tuple(parsed), tuple(notes), tuple(problems))


def _grouped(files: Sequence[Path]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {kind: [] for kind in (*KEPT, "kernels")}
    for path in files:
        if not path.is_file():
            raise UnsupportedFile(path, "there is no such file.", "Check the path.")
        if path.suffix in (".yaml", ".yml"):
            kind = next((one for one in COMPANIONS if path.stem.startswith(one)), "functions")
        elif path.suffix in (".cpp", ".cc", ".cxx"):
            kind = "kernels"
        elif path.suffix in (".h", ".hpp", ".json"):
            kind = "prototypes"
        elif path.suffix == ".py":
            kind = "modules"
        else:
            why = f"{path.suffix or 'a file without a suffix'} is none of the kinds it could be."
            fix = "Pass functions (.yaml), kernels (.cpp, .cc, .py) and prototypes (.h, .json)."
            raise UnsupportedFile(path, why, fix)
        groups[kind].append(path)
    for path in groups["functions"]:
        for kind in COMPANIONS:
            beside = path.with_name(f"{kind}.yaml")
            if beside.is_file() and beside not in groups[kind]:
                groups[kind].append(beside)
    return groups


def _source(path: Path) -> Source:
    return Source(str(path), path.read_bytes())


def _library(
    home: Path, path: Path, made: list[native.Implementation], old: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """The row of a library in the manifest, and whether it had to be built."""
    text = native.glue(path.resolve(), made)
    line = native.command()
    said = cpp.version(line[0])
    headers = [one.read_bytes() for one in sorted(native.INCLUDE.rglob("*.h"))]
    fixed = native.digest(text, torch.__version__, said, *line, *headers)
    row = old.get(str(path))
    if row is not None and row["fixed"] == fixed and _fresh(home, row):
        return row, False
    target = home / "files" / f"{path.stem}-{native.digest(str(path), fixed)[:12]}.so"
    inputs = native.compile_source(path.resolve(), text, target)
    return {
        "source": str(path),
        "file": f"files/{target.name}",
        "sha256": native.digest(target.read_bytes()),
        "fixed": fixed,
        "inputs": {str(one): native.digest(one.read_bytes()) for one in inputs},
        "implements": [one.op for one in made],
    }, True


def _fresh(home: Path, row: dict[str, Any]) -> bool:
    wanted = {home / row["file"]: row["sha256"]}
    wanted |= {Path(path): known for path, known in row["inputs"].items()}
    return all(
        path.is_file() and native.digest(path.read_bytes()) == known
        for path, known in wanted.items()
    )


def _copy(home: Path, source: Source) -> dict[str, str]:
    known = native.digest(source.data)
    name = f"files/{known[:12]}-{Path(source.name).name}"
    _write(home / name, source.data)
    return {"source": source.name, "file": name, "sha256": known}


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: another process may be reading."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def _sweep(home: Path, manifest: dict[str, Any]) -> None:
    """Remove the files that an earlier build left and this one does not use."""
    used = {home / row["file"] for kind in (*KEPT, "libraries") for row in manifest[kind]}
    for path in (home / "files").iterdir():
        if path not in used and path.is_file():
            path.unlink()


def _old(home: Path) -> dict[str, Any]:
    try:
        manifest = _manifest(home)
    except UnsupportedFile:
        return {}
    return {row["source"]: row for row in manifest["libraries"]}


def _manifest(home: Path) -> dict[str, Any]:
    path = home / "manifest.json"
    try:
        found = json.loads(path.read_text())
    except OSError:
        raise UnsupportedFile(home, "it has no manifest.json.", _FIX) from None
    except ValueError as error:
        raise UnsupportedFile(path, f"it is not JSON ({error}).", _FIX) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UnsupportedFile(path, f"its format is not {FORMAT}.", _FIX)
    return found


def _kept(home: Path, row: dict[str, str]) -> Source:
    return Source(row["source"], _verified(home, row).read_bytes())


def _verified(home: Path, row: dict[str, Any]) -> Path:
    path = home / str(row["file"])
    if path.parent.resolve() != (home / "files").resolve():
        raise UnsupportedFile(path, "it lies outside of the folder.", _FIX)
    if not path.is_file() or native.digest(path.read_bytes()) != row["sha256"]:
        raise UnsupportedFile(path, "it is not what was built (its hash differs).", _FIX)
    return path


_OPENED: set[str] = set()


def _open(home: Path, row: dict[str, Any]) -> None:
    """Open a library, once in a process: a second time would register everything twice."""
    path = _verified(home, row)
    if row["sha256"] in _OPENED:
        return
    said = native.open_library(path.resolve())
    if said is not None:
        raise KernelBuild(", ".join(row["implements"]), row["source"], _short(said))
    _OPENED.add(row["sha256"])


def _run(home: Path, row: dict[str, Any]) -> None:
    """Run a module of kernels, once in a process; its tracebacks name the file it was made from."""
    code = compile(_verified(home, row).read_bytes(), row["source"], "exec")
    if row["sha256"] not in _OPENED:
        exec(code, {"__name__": Path(row["source"]).stem, "__file__": row["source"]})
        _OPENED.add(row["sha256"])


def _short(said: str) -> str:
    """What torch says of a registration, less its traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    end = next((i for i, line in enumerate(lines) if line.startswith("Exception raised")), None)
    return "\n  ".join(lines[:end][:6])
