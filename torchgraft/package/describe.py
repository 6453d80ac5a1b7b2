"""What is in a package, and how two differ. Nothing in it is run, loaded or resolved."""

from __future__ import annotations

import difflib
import hashlib
import os
from typing import Any

from torchgraft.errors import BadPackage, BadPlan
from torchgraft.package import codec, tensors
from torchgraft.package.archive import WEIGHTS, Archive
from torchgraft.package.codec import field


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A package as plain data. It may be for another machine, torch or torchgraft release."""
    try:
        archive = Archive(path)
    except OSError as error:
        raise BadPackage(f"it cannot be read ({error.strerror})", path) from None
    archive.verify()
    try:
        return _describe(archive)
    except (BadPackage, BadPlan) as error:
        raise BadPackage(getattr(error, "why", str(error)), path) from None


def _describe(archive: Archive) -> dict[str, Any]:
    body, manifest = archive.json("program.json"), archive.manifest
    programs = field(body, "programs", list)
    gears = field(body, "gears", list)
    graphs = archive.json("graph.json")
    return {
        "name": field(body, "name", str),
        "front_end": field(body, "front_end", str),
        "mode": field(body, "mode", str),
        "bytes": len(archive.content),
        "made_by": {key: manifest.get(key) for key in ("torchgraft", "torch", "cuda")},
        "requires": manifest.get("requires"),
        "libraries": manifest.get("libraries"),
        "gears": [_gear(gear) for gear in gears],
        "graphs": ["\n".join(_graph(nodes)) for nodes in graphs],
        "plans": [str(codec.to_plan(field(part, "plan", dict))) for part in programs],
        "prepare": str(codec.to_plan(field(field(body, "prepare", dict), "plan", dict))),
        "regions": _regions(programs),
        "weights": _weights(archive, field(body, "weights", list)),
        "members": {name: entry["size"] for name, entry in manifest["members"].items()},
    }


def _gear(data: Any) -> dict[str, Any]:
    made = codec.to_signature({**data, "out_tree": "*", "tree": _row(data)})
    return {
        "inputs": {spec.name: str(spec) for spec in made.specs},
        "sizes": {name: list(bounds) for name, bounds in made.ranges.items()},
        "assumes": [f"{made.named(expr)} ({line})" for expr, line in made.guards],
        "call": data.get("tree"),
        "gives": data.get("out_tree"),
    }


def _row(data: Any) -> Any:
    """A call with as many arguments; its classes need not be known here."""
    return {"tuple": [{"tuple": ["*"] * len(field(data, "inputs", list))}, {"dict": []}]}


def _regions(programs: list[Any]) -> dict[str, str]:
    """The generated code, by program and kernel."""
    found = {}
    for i, part in enumerate(programs):
        for name, kernel in field(part, "kernels", dict).items():
            if field(kernel, "kind", str) == "library":
                found[f"{i}/{name}"] = field(kernel, "member", str)
    return found


def _weights(archive: Archive, entries: list[Any]) -> dict[str, Any]:
    stored = tensors.read(archive.members.get(WEIGHTS, memoryview(b"")))
    found = {}
    for entry in entries:
        tensor = stored.get(field(entry, "tensor", str))
        if tensor is None:
            raise BadPackage(f"weight {entry.get('name')!r} is not among the tensors")
        found[field(entry, "name", str)] = {
            "kind": field(entry, "kind", str),
            "type": f"{field(entry, 'dtype', str)}{field(entry, 'shape', list)}",
            "sha256": hashlib.sha256(tensors.bytes_of(tensor)).hexdigest(),
        }
    return found


def _graph(nodes: Any) -> list[str]:
    lines = []
    for node in nodes if isinstance(nodes, list) else []:
        op, target = field(node, "op", str), node.get("target")
        if isinstance(target, dict):
            overload = target.get("overload")
            target = f"{target.get('name')}{'.' + overload if overload else ''}"
        args = _text(node.get("args"))
        extra = [f"{k}={_text(v)}" for k, v in field(node, "kwargs", dict).items()]
        if op == "output":
            lines.append(f"return {args[1:-1].rstrip(',')}")
        elif op == "call_function":
            call = ", ".join([args[1:-1].rstrip(","), *extra] if len(args) > 2 else extra)
            line = f"  # {node['line']}" if node.get("line") else ""
            lines.append(f"{node['name']}: {node.get('type')} = {target}({call}){line}")
        else:
            lines.append(f"{node['name']}: {node.get('type')} = {op} {target}")
    return lines


def _text(data: Any) -> str:
    """An argument as it is written in Python."""
    if isinstance(data, list):
        return f"[{', '.join(map(_text, data))}]"
    if isinstance(data, dict) and len(data) == 1:
        [(kind, inner)] = data.items()
        if kind == "t":
            return f"({', '.join(map(_text, inner))}{',' * (len(inner) == 1)})"
        return f"torch.{inner}" if kind in ("dtype", "layout", "memory_format") else str(inner)
    return repr(data)


def differences(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """What differs between two descriptions; empty where nothing does."""
    found: dict[str, Any] = {}
    for key in ("name", "front_end", "mode", "made_by", "requires", "libraries", "gears"):
        if one[key] != two[key]:
            found[key] = {"old": one[key], "new": two[key]}
    for key in ("graphs", "plans"):
        lines = _lines(one[key], two[key])
        if lines:
            found[key] = lines
    if lines := _lines([one["prepare"]], [two["prepare"]]):
        found["prepare"] = lines
    for key in ("regions", "weights"):
        old, new = one[key], two[key]
        changed = {
            "new": sorted(new.keys() - old.keys()),
            "gone": sorted(old.keys() - new.keys()),
            "changed": sorted(n for n in old.keys() & new.keys() if old[n] != new[n]),
        }
        if any(changed.values()):
            found[key] = changed
    return found


def _lines(old: list[str], new: list[str]) -> list[str]:
    """The lines of a unified diff, without its headers."""
    one, two = ("\n\n".join(side).splitlines() for side in (old, new))
    return list(difflib.unified_diff(one, two, lineterm="", n=1))[2:]
