"""The tables of README.md and docs/ascend.md, from the tests: `python tests/compat/matrix.py`
writes them.

A test says what it shows with `@pytest.mark.feature(package, name)`; it works unless the mark says
"idle" (accepted, without effect) or "refused". Options come from the config's own table, each of
which a test sets; names are looked up, one by one.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import names

from torchgraft import compat
from torchgraft.compat import common, device, paths
from torchgraft.compat.air.config import CompilerConfig, NpuGraphExConfig
from torchgraft.compat.options import Section
from torchgraft.compat.refused import FUSED, REFUSED

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "ascend.md"
README = HERE.parents[1] / "README.md"
PACKAGES = ("torchgraft", "torchair", "npugraph_ex", "torch_aie", "mindietorch", "torch_npu")
TITLES = "works | accepted without effect | refused"
START, END = "<!-- matrix: python tests/compat/matrix.py -->\n", "<!-- end of matrix -->\n"
HOW = ("works", "idle", "refused")


def features() -> list[tuple[str, str, str, str]]:
    """(package, feature, how, test) of every mark, in the order of the files."""
    found = []
    for path in sorted([*HERE.glob("test_*.py"), *HERE.glob("npu/check_*.py")]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for call in _marks(node):
                package, name, *how = (str(ast.literal_eval(arg)) for arg in call.args)
                assert not how or how[0] in HOW, f"{path.name}: {how}"
                test = getattr(node, "name", "")
                place = path.relative_to(HERE).as_posix() + (f"::{test}" if test else "")
                found.append((package, name, how[0] if how else "works", place))
    return found


def _marks(node: ast.stmt) -> Iterator[ast.Call]:
    values: list[ast.expr] = list(getattr(node, "decorator_list", []))
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
        values += node.value.elts if isinstance(node.value, ast.List) else [node.value]
    for value in values:
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "pytest.mark.feature":
            yield value


def table() -> str:
    """The rows of the matrix, and the options without effect."""
    lines = [f"| package | feature | {TITLES} | shown by |"]
    lines.append("|---|---|:-:|:-:|:-:|---|")
    for package, name, how, test in _rows():
        lines.append(f"| `{package}` | {name} | {_ticks(how)} | `{test}` |")
    lines += ["", "Options that are checked and have no effect off the NPU:", ""]
    for title, config in (
        ("CompilerConfig", CompilerConfig()),
        ("npugraph_ex", NpuGraphExConfig()),
    ):
        by_reason: dict[str, list[str]] = {}
        for name, why in _idle(config):
            by_reason.setdefault(why, []).append(f"`{name}`")
        lines += [f"- {title}: {', '.join(names)}: {why}." for why, names in by_reason.items()]
    lines += ["", "Names that are refused, with the nearest that works:", ""]
    npu = {f"torch.npu.{name}": nearest for name, nearest in common.REFUSED.items()}
    fused = {f"torch_npu.{name}": nearest for name, nearest in FUSED.items()}
    every = REFUSED | paths.REFUSED | npu | fused
    lines += [f"- `{name}`: {nearest}" for name, nearest in every.items()]
    lines += ["", "Every public name:", "", f"| module | {TITLES} |", "|---|---|---|---|"]
    for module, listed in names.NAMES.items():
        cells = [
            " ".join(f"`{n}`" for n in listed.split() if names.state(module, n) == one)
            for one in HOW
        ]
        lines.append(f"| `{module}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _idle(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, kind in section.options.items():
        if kind.idle is not None:
            yield f"{prefix}{name}", kind.idle
    for name in section.sections:
        yield from _idle(getattr(section, name), f"{prefix}{name}.")


def short() -> str:
    """The features alone, folded."""
    rows = _rows()
    counts = [sum(how == one for _, _, how, _ in rows) for one in HOW]
    said = "{} features work, {} are accepted without effect, {} are refused".format(*counts)
    lines = ["<details>", f"<summary>{said}</summary>", ""]
    lines += [f"| package | feature | {TITLES} |", "|---|---|:-:|:-:|:-:|"]
    lines += [f"| `{package}` | {name} | {_ticks(how)} |" for package, name, how, _ in rows]
    return "\n".join([*lines, "", "</details>"]) + "\n"


def _rows() -> list[tuple[str, str, str, str]]:
    return sorted(features(), key=lambda row: PACKAGES.index(row[0]))


def _ticks(how: str) -> str:
    return " | ".join("✓" if how == one else "" for one in HOW)


def pages() -> dict[Path, str]:
    """Each page with its table made anew."""
    found = {}
    for path, made in ((README, short()), (PAGE, table())):
        head, _, rest = path.read_text(encoding="utf-8").partition(START)
        found[path] = f"{head}{START}\n{made}\n{END}{rest.partition(END)[2]}"
    return found


if __name__ == "__main__":
    os.environ[device.VARIABLE] = "cpu"  # as in the tests
    compat.install()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
