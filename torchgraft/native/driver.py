"""Builds the C++ targets of this package: `build("runtime")`, once per content and torch version.

A target is a folder beside this file with a `CMakeLists.txt`; the one here, above them all, knows
where torch is. What a target installs is its root. Two processes that want the same one wait for
each other, and a root is whole or not there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from torchgraft.errors import NativeBuild, UnknownName
from torchgraft.op.cpp import cache_dir, first_error, locked

SOURCE = Path(__file__).parent
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-DNDEBUG", "-w")
MODULE = str(sysconfig.get_config_var("EXT_SUFFIX"))
"""How the name of a module in C++ ends that this Python can import."""
_OWN = {".cpp", ".h", ".hpp", ".txt", ".in", ".cmake"}


@dataclasses.dataclass(frozen=True)
class Root:
    """Where a target was installed."""

    path: Path

    @property
    def include(self) -> Path:
        """Its headers."""
        return self.path / "include"

    @property
    def lib(self) -> Path:
        """Its shared libraries."""
        return self.path / "lib"

    @property
    def cmake(self) -> Path:
        """What `find_package` reads: `-Dtorchgraft_DIR=...`."""
        return self.path / "share" / "cmake" / "torchgraft"

    def __str__(self) -> str:
        return str(self.path)


def targets() -> list[str]:
    """What can be built."""
    return sorted(path.parent.name for path in SOURCE.glob("*/CMakeLists.txt"))


def build(target: str) -> Root:
    """Build a target, or find it built, and give its root.

    The first build of a target takes a minute or two; after that this costs some milliseconds.
    Raises `NativeBuild` where a tool is missing or the compiler refuses. A root that was built
    elsewhere is used where `TORCHGRAFT_NATIVE` names it.
    """
    if (root := built(target)) is not None:
        return root
    tools = _tools(target)
    place = _place(target, tools)
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent / f"{target}.lock"):
        if not place.exists():
            _build(target, tools, place)
    return Root(place)


def built(target: str) -> Root | None:
    """The root of a target that has been built; None where it has not, or cannot be."""
    if target not in targets():
        raise UnknownName("native target", target, targets(), where="torchgraft.native")
    if given := os.environ.get("TORCHGRAFT_NATIVE"):
        return Root(Path(given))
    if not any((cache_dir() / "native").glob(f"{target}-*")):  # none of any content
        return None
    try:
        place = _place(target, _tools(target))
    except NativeBuild:
        return None
    return Root(place) if place.exists() else None


def _place(target: str, tools: _Tools) -> Path:
    return cache_dir() / "native" / f"{target}-{_digest(target, tools)}"


@dataclasses.dataclass(frozen=True)
class _Tools:
    cmake: str
    generator: str
    cxx: str


def _tools(target: str) -> _Tools:
    missing = []
    cmake, ninja, make = map(_find, ("cmake", "ninja", "make"))
    cxx = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if cmake is None:
        missing.append("cmake (pip install cmake, or the system's)")
    if ninja is None and make is None:
        missing.append("ninja (pip install ninja) or make")
    if cxx is None:
        missing.append("C++ compiler (g++, or what CXX names)")
    if missing:
        raise NativeBuild(target, f"this machine has no {', no '.join(missing)}")
    return _Tools(str(cmake), "Ninja" if ninja else "Unix Makefiles", str(cxx))


def _find(name: str) -> str | None:
    """A tool on the path, or one that pip put beside this Python."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def _digest(target: str, tools: _Tools) -> str:
    """A name for everything that the result depends on."""
    parts = [torch.__version__, str(torch.compiled_with_cxx11_abi()), str(_torch_root())]
    parts += [_version(tools.cxx), *FLAGS, _python_headers(), MODULE, _cuda_headers()]
    for path in _sources(target):
        parts += [str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _sources(target: str) -> Iterator[Path]:
    """Every file that a target is made of: its folder's, and those that all targets share."""
    yield SOURCE / "CMakeLists.txt"
    for folder in ("cmake", "include", "third_party", target):
        for path in sorted((SOURCE / folder).rglob("*")):
            if path.is_file() and path.suffix in _OWN:
                yield path


@functools.cache
def _version(tool: str) -> str:
    return subprocess.run([tool, "--version"], capture_output=True, text=True).stdout + tool


def _python_headers() -> str:
    """Where this Python has its headers; empty where it has none."""
    folder = Path(sysconfig.get_path("include"))
    return str(folder) if (folder / "Python.h").exists() else ""


def _cuda_headers() -> str:
    """Where the headers of CUDA are that torch's own include: in a toolkit, or in what pip put
    beside torch. Empty where torch has no CUDA, or they are not there, or not all of them."""
    root, packages = _torch_root(), _torch_root().parent
    if torch.version.cuda is None or not (root / "lib" / "libtorch_cuda.so").exists():
        return ""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(home, "include") for home in homes if home]
    places += [Path("/usr/local/cuda/include"), *sorted(packages.glob("nvidia/cu*/include"))]
    places += [packages / "triton" / "backends" / "nvidia" / "include"]
    needed = ("cuda_runtime.h", "crt/host_config.h")
    return next((str(p) for p in places if all((p / file).exists() for file in needed)), "")


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _build(target: str, tools: _Tools, root: Path) -> None:
    header = _header(tools)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f"{target}-build-") as scratch:
        made = Path(scratch, "root")
        configure = [
            *(tools.cmake, "-S", str(SOURCE), "-B", str(Path(scratch, "build"))),
            *("-G", tools.generator, f"-DCMAKE_CXX_COMPILER={tools.cxx}"),
            f"-DCMAKE_INSTALL_PREFIX={made}",
            f"-DGRAFT_TARGET={target}",
            f"-DGRAFT_FLAGS={';'.join(FLAGS)}",
            f"-DGRAFT_HEADER={header}",
            f"-DTORCH_ROOT={_torch_root()}",
            f"-DGRAFT_TORCH={torch.__version__}",
            f"-DGRAFT_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-DGRAFT_PYTHON={_python_headers()}",
            f"-DGRAFT_SUFFIX={MODULE}",
            f"-DGRAFT_CUDA={_cuda_headers()}",
        ]
        _run(target, configure, root)
        compile_ = [tools.cmake, "--build", str(Path(scratch, "build")), "--target", "install"]
        _run(target, [*compile_, "--parallel", str(os.cpu_count() or 1)], root)
        made.replace(root)


def _header(tools: _Tools) -> Path:
    """A header of torch with its precompiled form beside it; kept for every target.

    A file that includes ATen takes 20 to 35 s to compile without it, and 2 to 4 s with it.
    """
    from torch.utils import cpp_extension  # slow to import, and a root that is built needs none

    text = "#include <torch/script.h>\n#include <torch/library.h>\n"
    abi = int(torch.compiled_with_cxx11_abi())
    command = [tools.cxx, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    key = "\0".join([_version(tools.cxx), torch.__version__, text, *command])
    folder = cache_dir() / "native" / f"header-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    header, ready = folder / "graft.h", folder / "graft.h.gch"
    if ready.exists():
        return header
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not ready.exists():
            header.write_text(text, encoding="utf-8")
            part = folder / "part.gch"
            _run("header", [*command, "-x", "c++-header", str(header), "-o", str(part)], folder)
            part.replace(ready)
    return header


def _run(target: str, command: Sequence[str], beside: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        log = beside.with_name(f"{target}.log")
        log.write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}", encoding="utf-8")
        raise NativeBuild(target, first_error(done.stdout + done.stderr), str(log))
