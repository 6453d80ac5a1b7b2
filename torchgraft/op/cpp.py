"""C++ and CUDA sources of kernels: compiled on first use, kept by content, opened and closed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import torch

from torchgraft._torch import generator
from torchgraft.errors import BadValue, KernelBuild

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_ERROR = re.compile(r"^(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", re.MULTILINE)
_CUDA_ERROR = re.compile(r"^(.*?)\((\d+)\): (?:catastrophic )?error:? *(.*)$", re.MULTILINE)
_LINK_ERROR = re.compile(r"^.*(undefined reference|cannot find).*$", re.MULTILINE)

HEADER = """\
#include <ATen/ATen.h>
#include <torch/library.h>
"""

# A call whose tensors need no gradient goes on to the kernel without meeting Python; one that does
# goes to the kernel of AutogradOther, which is the operator's own, in Python.
GLUE = """
namespace {{
[[maybe_unused]] bool graft_watched(const c10::IValue& value) {{
  if (value.isTensor()) {{
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() &&
        ((at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined());
  }}
  if (value.isList()) {{
    for (const c10::IValue& item : value.toListRef())
      if (graft_watched(item)) return true;
  }}
  return false;
}}

[[maybe_unused]] void graft_autograd(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {{
  const auto values = torch::jit::last(*stack, op.schema().arguments().size());
  bool watched = false;
  for (const c10::IValue& value : values) watched = watched || graft_watched(value);
  if (watched)
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradOther), stack);
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}}
}}  // namespace

extern "C" __attribute__((visibility("default")))
void* graft_open(char* said, size_t room) noexcept {{
  auto libraries = std::make_unique<std::vector<torch::Library>>();
  try {{
    libraries->emplace_back(
        torch::Library::IMPL, "{space}", c10::DispatchKey::{key}, __FILE__, __LINE__);
    libraries->back().impl("{name}", TORCH_FN({function}));
    if ({autograd}) {{
      libraries->emplace_back(
          torch::Library::IMPL, "{space}", c10::DispatchKey::Autograd{key}, __FILE__, __LINE__);
      libraries->back().impl(
          "{name}", torch::CppFunction::makeFromBoxedFunction<&graft_autograd>());
    }}
  }} catch (const std::exception& error) {{
    snprintf(said, room, "%s", error.what());
    return nullptr;
  }}
  return libraries.release();
}}

extern "C" __attribute__((visibility("default")))
void graft_close(void* libraries) noexcept {{
  delete static_cast<std::vector<torch::Library>*>(libraries);
}}
"""


@dataclasses.dataclass(frozen=True)
class Source:
    """The text of a kernel, and where it is from."""

    text: str
    language: str  # "C++" or "CUDA"
    name: str  # its file, or the line of Python that holds it
    path: pathlib.Path | None = None

    @classmethod
    def read(cls, given: str | os.PathLike[str], language: str, where: str) -> Source:
        """A source from its text, or from the file that a one-line string names, beside `where`."""
        if isinstance(given, str) and ("\n" in given or "{" in given):
            return cls(given, language, f"{language} text at {where}")
        path = pathlib.Path(where).parent / given
        if not path.is_file():
            raise BadValue("kernel", str(given), f"{language} text, or a file beside {where}")
        return cls(path.read_text(), language, str(path), path.resolve())

    def files(self) -> dict[str, str]:
        """The headers of its own (`#include "..."`) that it is made of, deeply, with their text."""
        found: dict[str, str] = {}

        def visit(text: str, folder: pathlib.Path) -> None:
            for name in _INCLUDE.findall(text):
                path = (folder / name).resolve()
                if str(path) not in found and path.is_file():
                    found[str(path)] = path.read_text()
                    visit(found[str(path)], path.parent)

        visit(self.text, self.path.parent if self.path else pathlib.Path.cwd())
        return found


def cache_dir() -> pathlib.Path:
    """Where built kernels are kept: `TORCHGRAFT_CACHE`, else the user's cache."""
    given = os.environ.get("TORCHGRAFT_CACHE")
    if given:
        return pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "torchgraft"


@dataclasses.dataclass
class Opened:
    """A kernel in torch's dispatcher, until it is closed."""

    library: ctypes.CDLL
    handle: int

    def close(self) -> None:
        self.library.graft_close(ctypes.c_void_p(self.handle))


def open_kernel(
    op: str, key: str, source: Source, *, autograd: bool, function: str | None = None
) -> Opened:
    """Build a source (or find it built) and put its function into the dispatcher.

    The function has the operator's own name, or `function`. `op` is `ns::name`; `autograd` adds a
    way past Python for calls that need no gradient.
    """
    space, name = op.split("::")
    function = function or name.partition(".")[0]
    glue = GLUE.format(
        space=space, name=name, key=key, function=function, autograd=str(autograd).lower()
    )
    library = ctypes.CDLL(str(build(op, source, glue)))
    library.graft_open.restype = ctypes.c_void_p
    said = ctypes.create_string_buffer(8192)
    handle = library.graft_open(said, ctypes.c_size_t(len(said)))
    if not handle:
        text = said.value.decode(errors="replace").partition("Exception raised from")[0].strip()
        raise KernelBuild(op, source.name, text.replace("\n", "\n  "))
    return Opened(library, handle)


def target(source: Source, glue: str = "") -> pathlib.Path:
    """Where the library of a source is, or will be; raises where there is no compiler."""
    line = command(source.name, source.language, source.name)
    folder = cache_dir() / "ops" / _digest(version(line[0]), *line)
    files = [text for pair in sorted(source.files().items()) for text in pair]
    return folder / f"{_digest(source.text, str(source.path), glue, *files)}.so"


def build(op: str, source: Source, glue: str = "") -> pathlib.Path:
    """The shared library of a source; compiled unless the same one was before."""
    line = command(op, source.language, source.name)
    place = target(source, glue)
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent / "lock"):
        if not place.exists():
            header = _header(place.parent, line) if source.language == "C++" else []
            needs = HEADER if source.language == "CUDA" else ""
            text = f'{needs}#line 1 "{source.name}"\n{source.text}\n#line 1 "torchgraft"\n{glue}'
            near = source.path.parent if source.path else pathlib.Path.cwd()
            compile_library(op, source.name, text, place, [*line, *header], [near])
    return place


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def command(op: str, language: str, source: str) -> list[str]:
    """The compiler of a language ("C++" or "CUDA") and the flags that everything is compiled with;
    raises for `op` where there is none."""
    if language == "CUDA":
        from torch.utils import cpp_extension

        home = cpp_extension.CUDA_HOME
        found = shutil.which("nvcc") or (home and shutil.which(os.path.join(home, "bin", "nvcc")))
        want, more = "nvcc, of the CUDA toolkit", []
    else:
        wanted, *more = shlex.split(os.environ.get("CXX") or "c++")
        found = shutil.which(wanted) or shutil.which("g++")
        want = "a C++ compiler (c++, g++, or what CXX names)"
    if not found:
        raise KernelBuild(op, source, f"there is no {want}.")
    return [str(found), *more, *_flags(language)]


def version(tool: str) -> str:
    """What a compiler says of itself, and where it is."""
    return subprocess.run([tool, "--version"], capture_output=True, text=True).stdout + tool


def _flags(language: str) -> list[str]:
    from torch.utils import cpp_extension  # which looks for CUDA, and warns where it finds half

    paths = cpp_extension.include_paths()  # nvcc knows the toolkit's own
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-O3", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DNDEBUG"]
    flags += [flag for path in paths for flag in ("-isystem", path)]
    flags += [f"-DTORCHGRAFT_TORCH={torch.__version__}".replace("+", "_")]
    if language == "C++":
        return [*flags, "-fPIC", "-fvisibility=hidden", "-w"]
    major, minor = torch.cuda.get_device_capability()
    return [
        *flags,
        f"-arch=sm_{major}{minor}",
        "-Xcompiler=-fPIC",
        "-w",
        "--expt-relaxed-constexpr",
    ]


def _header(folder: pathlib.Path, line: Sequence[str]) -> list[str]:
    """The flags for a precompiled header, made for the second kernel: it costs as much as compiling
    two of them without, and each one after that takes 2 s instead of 11."""
    header = folder / "graft.h"
    ready = folder / "graft.h.gch"
    if not header.exists():
        header.write_text(HEADER)
        return ["-include", str(header)]
    if not ready.exists():
        part = folder / f"header{os.getpid()}.gch"
        made = subprocess.run(
            [*line, "-x", "c++-header", str(header), "-o", str(part)], capture_output=True
        )
        if made.returncode == 0:
            part.replace(ready)
    return ["-include", str(header)]


def compile_library(
    op: str,
    source: str,
    text: str,
    target: pathlib.Path,
    line: Sequence[str],
    near: Iterable[pathlib.Path],
) -> list[pathlib.Path]:
    """Compile a text into a library at `target`, whole or not at all; the files that C++ read.

    `line` is the compiler with its flags, `near` are folders to look for headers in. What does not
    compile raises for `op` with the compiler's first error; all it said is beside the target.
    """
    from torch.utils import cpp_extension

    cuda = "-Xcompiler=-fPIC" in line
    links = [flag for path in cpp_extension.library_paths() for flag in ("-L", path)]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
    if cuda:
        libraries += ["--cudart=shared", "-lc10_cuda", "-ltorch_cuda"]
    host = shutil.which("c++") or "g++" if cuda else line[0]
    libraries += [part for flag in generator.shared_cxx(host) for part in ("-Xlinker", flag)]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        names = (f"unit.{'cu' if cuda else 'cpp'}", "unit.so", "unit.d")
        unit, made, needs = (pathlib.Path(scratch, name) for name in names)
        unit.write_text(text)
        flags = [f"-I{path}" for path in near]
        flags += [] if cuda else ["-MMD", "-MF", str(needs)]
        full = [*line, *flags, "-shared", str(unit), "-o", str(made)]
        run = subprocess.run([*full, *links, *libraries], capture_output=True, text=True)
        if run.returncode != 0:
            log = target.with_suffix(".log")
            log.write_text(run.stdout + run.stderr)
            raise KernelBuild(op, source, first_error(run.stderr + run.stdout), str(log))
        made.replace(target)  # whole or not at all, for every process that looks
        words = needs.read_text().replace("\\\n", " ").split()[1:] if needs.exists() else []
        return sorted({pathlib.Path(word).resolve() for word in words} - {unit.resolve()})


def first_error(said: str) -> str:
    """The compiler's first error in one line, with its place.

    >>> first_error("In file included from a.h\\nk.cpp:3:8: error: expected ';'\\n  x\\nk.cpp:9: …")
    "k.cpp:3: expected ';'"
    """
    for pattern in (_ERROR, _CUDA_ERROR):
        if found := pattern.search(said):
            return f"{found[1]}:{found[2]}: {found[3]}"
    if link := _LINK_ERROR.search(said):
        return link[0].strip()
    lines = said.strip().splitlines()
    return lines[0] if lines else f"the compiler on this {platform.system()} said nothing"


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """One process at a time; the others wait and then find what it built."""
    with path.open("w") as file:
        try:
            import fcntl
        except ImportError:  # no such locks there; the rename at the end is what keeps it right
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
