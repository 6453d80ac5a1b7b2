"""The table of docs/ascend.md, from the tests: `python tests/compat/matrix.py` writes it.

A test says what it shows with `@pytest.mark.feature(package, name)`; it works unless the mark says
"idle" (accepted, without effect) or "refused". Options come from the config's own table, each of
which a test sets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torchgraft.compat.air.config import CompilerConfig, NpuGraphExConfig
from torchgraft.compat.options import Section
from torchgraft.compat.refused import REFUSED

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "ascend.md"
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
    lines = ["| package | feature | works | accepted without effect | refused | shown by |"]
    lines.append("|---|---|:-:|:-:|:-:|---|")
    order = ("torchgraft", "torchair", "npugraph_ex", "torch_aie", "mindietorch", "torch_npu")
    for package, name, how, test in sorted(features(), key=lambda row: order.index(row[0])):
        ticks = " | ".join("✓" if how == one else "" for one in HOW)
        lines.append(f"| `{package}` | {name} | {ticks} | `{test}` |")
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
    lines += [f"- `{name}`: {nearest}" for name, nearest in REFUSED.items()]
    return "\n".join(lines) + "\n"


def _idle(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, kind in section.options.items():
        if kind.idle is not None:
            yield f"{prefix}{name}", kind.idle
    for name in section.sections:
        yield from _idle(getattr(section, name), f"{prefix}{name}.")


def page() -> str:
    """The page with its table made anew."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{head}{START}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
