"""The page's script in the package is what `web/` builds."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

import process
import pytest

from torchgraft.inspect.page import ASSETS

WEB = pathlib.Path(__file__).parents[2] / "web"
BUILT = json.loads((ASSETS / "built.json").read_text())


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_assets_were_built_from_these_sources() -> None:
    """Where this fails: `cd web && npm ci && npm run build`."""
    found = (*WEB.iterdir(), *(WEB / "src").iterdir())
    sources = [path for path in found if path.is_file() and not path.name.startswith(".")]
    assert {p.relative_to(WEB).as_posix(): digest(p) for p in sources} == BUILT["from"]
    built = [path for path in ASSETS.iterdir() if path.name != "built.json"]
    assert {path.name: digest(path) for path in built} == BUILT["to"]


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.skipif(not (WEB / "node_modules").is_dir(), reason="npm ci was not run in web/")
def test_a_build_gives_the_same_bytes(tmp_path: pathlib.Path) -> None:
    process.output(["node", "build.mjs", tmp_path], cwd=WEB)
    for path in ASSETS.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    process.output(["npm", "run", "check"], cwd=WEB)
