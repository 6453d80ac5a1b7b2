"""What a compile depends on, part by part: equal keys, equal programs."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgraft import _torch
from torchgraft._torch import generator
from torchgraft.comm.group import name_of
from torchgraft.comm.ops import is_collective
from torchgraft.config import FIELDS, Config
from torchgraft.convert.define import candidates
from torchgraft.errors import NotSavable
from torchgraft.fx import edit, mark, meta
from torchgraft.fx.capture import Capture
from torchgraft.package import codec, machine
from torchgraft.package.fingerprint import fingerprint, tensor
from torchgraft.passes.pipeline import passes_for

Key = dict[str, dict[str, str]]
"""Parts (`graph`, `weights`, `passes`, …), each with its items by name."""

_ELSEWHERE = {
    "pre_passes",
    "post_passes",
    "patterns",
    "converters",
    "registry",
    "verify_dir",
    "cache_dir",
    "cache_bytes",
    "inductor",
}


def key_of(name: str, front_end: str, captures: Sequence[Capture], config: Config) -> Key:
    """The key of a compile; `Unknowable` where some part of it has no fingerprint."""
    parts: Key = {
        "program": {"name": name, "front end": front_end},
        "graph": {},
        "weights": {},
        "passes": _passes(config),
        "config": _config(config),
        "versions": _versions(),
        "machine": _machine(captures),
    }
    for gear, taken in enumerate(captures):
        for item, text in _graph(taken).items():
            parts["graph"][f"{gear}: {item}"] = text
        for item, weight in taken.weights.items():
            parts["weights"].setdefault(item, tensor(getattr(taken.gm, weight.attribute)))
        for item, constant in taken.constants.items():
            if isinstance(constant, Tensor):
                parts["weights"][f"{gear}: {item}"] = tensor(constant)
    return parts


def digest(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """What differs between two keys, part by part, for people."""
    lines = []
    for part in new.keys() | old.keys():
        one, two = old.get(part, {}), new.get(part, {})
        changed = [item for item in two if item in one and one[item] != two[item]]
        shown = [f"{i} changed{_shown(part, one[i], two[i])}" for i in changed[:3]]
        for word, items in (("new", two.keys() - one.keys()), ("gone", one.keys() - two.keys())):
            shown += [f"{item} is {word}" for item in sorted(items)[:3]]
        count = len(changed) + len(one.keys() ^ two.keys())
        if count:
            more = f" and {count - len(shown)} more" if count > len(shown) else ""
            lines.append(f"{part}: {'; '.join(shown)}{more}")
    return sorted(lines)


def _shown(part: str, old: str, new: str) -> str:
    if part in ("weights", "passes"):
        return ""  # hashes say nothing to a reader
    return f" from {old[:120]} to {new[:120]}"


def _graph(taken: Capture) -> dict[str, str]:
    """The graph as it was captured, line by line, and how it is called."""
    items = _nodes(taken.gm, "")
    try:
        items["signature"] = json.dumps(codec.signature(taken.signature))
    except NotSavable as error:
        items["signature"] = str(error)
    items["dynamic"] = str(taken.gm.meta.get("dynamic", False))
    for name, state in taken.states.items():
        items[f"state {name}"] = f"{_type(state)} {name in taken.saved}"
    return items


def _nodes(gm: GraphModule, path: str) -> dict[str, str]:
    items: dict[str, str] = {}
    for node in gm.graph.nodes:
        items[path + node.name] = _line(node)
        held = meta.attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(held, GraphModule):  # a branch
            items |= _nodes(held, f"{path}{node.name}/")
    return items


def _line(node: Node) -> str:
    target = edit.target_name(node.target)
    marks = {**(node.meta.get("custom") or {}), "fallback": mark.in_fallback(node)}
    args = node.args
    if is_collective(node):  # torch's name of a group is another one on each rank
        args = (*args[:-1], name_of(args[-1]))
    call = f"{node.op} {target} {args} {node.kwargs}"
    return f"{call} {_type(node.meta.get('val'))} {marks} {mark.modules_of(node)}"


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout == torch.strided else value.layout
        return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type, value))})"
    return str(_torch.expression(value)) if not isinstance(value, GraphModule) else "graph"


def _passes(config: Config) -> dict[str, str]:
    items = {}
    for i, spec in enumerate(passes_for(config)):
        # Slots and templates follow from a pattern's function and types.
        held = {k: v for k, v in vars(spec).items() if k not in ("where", "templates", "slots")}
        items[f"{i} {spec.name}"] = fingerprint(held)
    for op, asked in candidates(config).items():
        for i, one in enumerate(asked):
            items[f"{op} converter {i} {one.name}"] = fingerprint((one.name, one.fn, one.when))
    return items


def _config(config: Config) -> dict[str, str]:
    items = {name: _setting(getattr(config, name)) for name in FIELDS if name not in _ELSEWHERE}
    options = {f"inductor.{name}": fingerprint(held) for name, held in config.inductor.items()}
    return {**items, **options, "inductor": generator.settings_hash()}


def _setting(held: Any) -> str:
    if isinstance(held, tuple):
        return str([_setting(item) for item in held])
    if isinstance(held, type):
        return f"{held.__module__}.{held.__qualname__}"
    return str(held) if isinstance(held, (str, int, bool, type(None))) else fingerprint(held)


@functools.cache
def _versions() -> dict[str, str]:
    import torchgraft

    digest = hashlib.sha256()
    root = pathlib.Path(torchgraft.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.read_bytes())
    return {
        "torchgraft": f"{torchgraft.__version__} {digest.hexdigest()[:16]}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def _machine(captures: Sequence[Capture]) -> dict[str, str]:
    values = [n.meta.get("val") for c in captures for n in c.gm.graph.nodes]
    devices = sorted({str(v.device) for v in values if isinstance(v, Tensor)})
    return {
        "machine": platform.machine(),
        "cpu": " ".join(machine.cpu_sets()),
        "compiler": f"{os.environ.get('CXX')} {generator.has_compiler()}",
        "devices": " ".join(devices),
        "capability": " ".join(
            str(torch.cuda.get_device_capability(d)) for d in devices if d.startswith("cuda")
        ),
    }
