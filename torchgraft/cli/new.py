"""`torchgraft new`: a small project that builds, tests and ships operators."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

import click

import torchgraft

TEMPLATES = Path(torchgraft.__file__).parent / "templates" / "new"

_LAYERS = {
    "python": ("common", "python"),
    "cpp": ("common", "cpp"),
    "cuda": ("common", "cpp", "cuda"),
}
_ROWS = {
    "python": "",
    "cpp": "| `csrc/` | the CPU kernel, in C++ |\n",
    "cuda": "| `csrc/` | the kernels for CPU (C++) and CUDA |\n",
}
_WHEEL = """ One wheel runs with torch 2.11 and every newer one,
and with every Python from 3.10: kernels use torch's stable ABI only, and no Python. It stays so
as long as csrc/ includes nothing of torch but `torch/csrc/stable`, `torch/headeronly` and the C
shim."""
_RENAMED = {"gitignore": ".gitignore", "github": ".github"}


@click.command()
@click.argument("name")
@click.option("--cpp", "kind", flag_value="cpp", help="With a kernel in C++.")
@click.option("--cuda", "kind", flag_value="cuda", help="With kernels in C++ and in CUDA.")
@click.option("--in", "parent", default=".", help="The folder to make the project in.")
def new(name: str, kind: str | None, parent: str) -> None:
    """Write a project NAME with one operator, its test, a CI file and a README."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise click.BadParameter(
            f"{name!r} cannot be a package and a namespace of operators. "
            f"Use small letters, digits and underscores, such as my_ops.",
            param_hint="NAME",
        )
    target = Path(parent) / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise click.ClickException(f"{target} is there already, and is not an empty folder.")
    written = write_project(target, name, kind or "python")
    for path in written:
        click.echo(path)
    click.echo(f"\ncd {target} && pip install --no-build-isolation -e '.[test]' && pytest")


def write_project(target: Path, name: str, kind: str) -> list[Path]:
    """Write the files of a project of this kind; their paths, in order."""
    words = {
        "@name@": name,
        "@rows@": _ROWS[kind],
        "@wheel@": "" if kind == "python" else _WHEEL,
    }
    texts: dict[Path, str] = {}
    for layer in _LAYERS[kind]:  # a later one writes over an earlier one
        for path in (TEMPLATES / layer).rglob("*.tmpl"):
            texts[path.relative_to(TEMPLATES / layer).with_suffix("")] = path.read_text("utf-8")
    written = []
    for path, text in sorted(texts.items()):
        parts = [name if part == "package" else _RENAMED.get(part, part) for part in path.parts]
        file = target.joinpath(*parts)
        for word, value in words.items():
            text = text.replace(word, value)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        written.append(file)
    return written
