"""What a package needs of the machine, and whether this one has it."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from collections.abc import Iterable
from typing import Any

import torch

from torchgraft.errors import BadPackage, MissingLibrary, WrongMachine
from torchgraft.package.codec import field, text

_SETS = re.compile(
    r"s?sse\w*|avx\w*|amx_\w+|fma4?|f16c|bmi[12]|popcnt|movbe|abm|adx|v?aes|v?pclmulqdq|gfni|"
    r"sha(_ni|[1-9]\w*)?|asimd\w*|sve\w*|sme2?|i8mm|bf16|atomics|fphp|neon"
)


def release() -> str:
    """torch's version without the part that says how it was built."""
    return torch.__version__.partition("+")[0]


@functools.cache
def cpu_sets() -> tuple[str, ...]:
    """The instruction sets of this processor that a compiler may use, as the kernel names them."""
    try:
        with open("/proc/cpuinfo") as file:
            found = re.search(r"^(?:flags|Features)\s*: (.*)$", file.read(), re.MULTILINE)
    except OSError:
        return ()
    return tuple(sorted(filter(_SETS.fullmatch, found.group(1).split()))) if found else ()


def requirements(device: torch.device, has_code: bool) -> dict[str, Any]:
    """What a program on `device` needs; its own code is for this very processor."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "machine": platform.machine(),
        "cpu": list(cpu_sets()) if has_code else [],
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
    }


def check(path: object, manifest: Any, device: torch.device | None) -> torch.device:
    """Raise unless this machine and this torch can run it; gives the device it will run on."""
    if (made := field(manifest, "torch", str)) != release():
        fix = f"Install torch {made}, or compile and save it again with this one."
        raise WrongMachine(path, f"torch {made}", f"torch {torch.__version__}", fix)
    requires = field(manifest, "requires", dict)
    kind = field(requires, "device", str)
    if (machine := field(requires, "machine", str)) != platform.machine():
        fix = f"Compile and save it on a {platform.machine()} machine."
        raise WrongMachine(path, f"a {machine} processor", platform.machine(), fix)
    missing = sorted(set(map(text, field(requires, "cpu", list))) - set(cpu_sets()))
    if missing:
        fix = "Compile and save it on a machine with this processor, or an older one."
        raise WrongMachine(path, f"a processor with {', '.join(missing)}", "one without", fix)
    if device is not None and device.type != kind:
        fix = f"Leave device= out, or compile the model on {device.type!r} and save that."
        raise WrongMachine(path, f"device {kind!r}", f"device={str(device)!r}", fix)
    if kind == "cuda":
        return _check_cuda(path, manifest, device)
    if device is not None and device.index is not None:
        return device
    try:
        place = torch.device(kind)
        if kind == "cpu":
            return place
        return torch.device(kind, torch.get_device_module(place).current_device())
    except RuntimeError:
        raise BadPackage(f"there is no device {kind!r}") from None


def _check_cuda(path: object, manifest: Any, device: torch.device | None) -> torch.device:
    if not torch.cuda.is_available():
        fix = "Run it on a machine with a CUDA device, or compile and save it for 'cpu'."
        raise WrongMachine(path, "a CUDA device", "none", fix)
    if (cuda := manifest.get("cuda")) != torch.version.cuda:
        fix = "Install the torch it was made with, or compile and save it again."
        raise WrongMachine(path, f"CUDA {cuda}", f"CUDA {torch.version.cuda}", fix)
    place = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    if place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place.index >= (count := torch.cuda.device_count()):
        here = ", ".join(f"cuda:{i}" for i in range(count))
        fix = "Leave the device out, or choose one that is here."
        raise WrongMachine(path, f"device {str(place)!r}", here, fix)
    needs = tuple(field(manifest["requires"], "capability", list))
    if len(needs) != 2:
        raise BadPackage(f"its compute capability is {list(needs)}")
    if (has := torch.cuda.get_device_capability(place)) != needs:
        name = torch.cuda.get_device_name(place)
        shown = ".".join(map(str, needs))
        fix = f"Compile and save it on a device of capability {'.'.join(map(str, has))}."
        raise WrongMachine(
            path, f"compute capability {shown}", f"{'.'.join(map(str, has))} ({name})", fix
        )
    return place


# --- Libraries of operators ---


def libraries(ops: Iterable[Any]) -> list[dict[str, Any]]:
    """The shared libraries that register these operators, by name and content."""
    found: dict[str | None, list[str]] = {}
    for op in ops:
        found.setdefault(_library_of(op), []).append(op.name())
    return [
        {
            "name": path and os.path.basename(path),
            "sha256": path and _hash(path),
            "ops": sorted(set(names)),
        }
        for path, names in sorted(found.items(), key=lambda item: item[0] or "")
    ]


def _library_of(op: Any) -> str | None:
    """The loaded library whose bytes name an operator; None: it is declared in Python."""
    space, _, name = op.name().partition(".")[0].partition("::")
    for path in sorted(map(str, torch.ops.loaded_libraries)):
        with open(path, "rb") as file:
            content = file.read()
        if space.encode() in content and name.encode() in content:
            return str(os.path.realpath(path))
    return None


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def check_libraries(path: object, manifest: Any, exists: Any) -> None:
    """Raise `MissingLibrary` unless every operator is here, and from the same library."""
    loaded = {os.path.basename(name): name for name in torch.ops.loaded_libraries}
    for entry in field(manifest, "libraries", list):
        ops = [text(op) for op in field(entry, "ops", list)]
        name = entry.get("name")
        missing = [op for op in ops if not exists(op)]
        if missing:
            raise MissingLibrary(path, missing, name, "which no loaded library registers")
        if name in loaded and _hash(loaded[name]) != entry.get("sha256"):
            raise MissingLibrary(
                path, ops, name, f"and the loaded {name} is not the one it was compiled with"
            )
