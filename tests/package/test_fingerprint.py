"""Edits that change what a pass does, written in every way that we could think of: none is missed.

Each is a module with a pass `edit`, in two versions: `NEW` is 2.0 in one and 5.0 in the other.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import torchgraft as graft
from torchgraft.package.fingerprint import Unknowable, fingerprint

EDITS = {
    "closure": """
def make(k):
    def edit(gm): return k
    return edit
edit = make(NEW)
""",
    "default": "def edit(gm, k=NEW): return k",
    "keyword default": "def edit(gm, *, k=NEW): return k",
    "mutable default": "def edit(gm, k=[NEW]): return k[0]",
    "global": "K = NEW\ndef edit(gm): return K",
    "helper": "def helper(): return NEW\ndef edit(gm): return helper()",
    "attribute of a function": "def edit(gm): return edit.k\nedit.k = NEW",
    "annotation": "def edit(gm, k: NEW = None): return edit.__annotations__['k']",
    "decorator": """
def decorate(fn):
    @functools.wraps(fn)
    def inner(gm): return fn(gm) or NEW
    return inner
@decorate
def edit(gm): pass
""",
    "argument of a decorator": """
def decorate(k):
    def outer(fn):
        @functools.wraps(fn)
        def inner(gm): return k
        return inner
    return outer
@decorate(NEW)
def edit(gm): pass
""",
    "cached helper": """
@functools.cache
def helper(): return NEW
def edit(gm): return helper()
""",
    "method of a dict": "get = {'k': NEW}.get\ndef edit(gm): return get('k')",
    "subclass of dict": """
class Table(dict):
    def __missing__(self, key): return NEW
TABLE = Table()
def edit(gm): return TABLE['k']
""",
    "default dict": "T = collections.defaultdict(lambda: NEW)\ndef edit(gm): return T['k']",
    "subclass of float": """
class Number(float):
    def value(self): return NEW
NUMBER = Number(1)
def edit(gm): return NUMBER.value()
""",
    "attribute of a list": """
class Row(list): pass
ROW = Row()
ROW.k = NEW
def edit(gm): return ROW.k
""",
    "named tuple": "T = collections.namedtuple('T', 'k')(NEW)\ndef edit(gm): return T.k",
    "value of an enum": """
class Kind(enum.Enum):
    A = NEW
def make(kind):
    def edit(gm): return kind.value
    return edit
edit = make(Kind.A)
""",
    "method of an enum": """
class Kind(enum.Enum):
    A = 1
    def k(self): return NEW
A = Kind.A
def edit(gm): return A.k()
""",
    "class attribute": """
class Edit:
    k = NEW
    def __call__(self, gm): return self.k
edit = Edit()
""",
    "base class": """
class Base:
    def k(self): return NEW
class Edit(Base):
    def __call__(self, gm): return self.k()
edit = Edit()
""",
    "metaclass": """
class Meta(type):
    def k(cls): return NEW
class Edit(metaclass=Meta):
    def __call__(self, gm): return type(self).k()
edit = Edit()
""",
    "property": """
class Edit:
    @property
    def k(self): return NEW
    def __call__(self, gm): return self.k
edit = Edit()
""",
    "cached property": """
class Edit:
    @functools.cached_property
    def k(self): return NEW
    def __call__(self, gm): return self.k
edit = Edit()
""",
    "slot": """
class Edit:
    __slots__ = 'value'
    def __call__(self, gm): return self.value
edit = Edit()
edit.value = NEW
""",
    "private slot": """
class Edit:
    __slots__ = ('__value',)
    def __init__(self): self.__value = NEW
    def __call__(self, gm): return self.__value
edit = Edit()
""",
    "import inside": "def edit(gm):\n    from edited_b import k\n    return k()",
    "import of a module inside": "def edit(gm):\n    import edited_b\n    return edited_b.k()",
    "module of a module": "import edited_a\ndef edit(gm): return edited_a.edited_b.k()",
    "helper of a module of a module": "import edited_a\ndef edit(gm): return edited_a.k()",
    "name in a text": "import edited_a\ndef edit(gm): return getattr(edited_a, 'k')()",
    "bound method": """
class Edit:
    def __init__(self, k): self.k = k
    def run(self, gm): return self.k
edit = Edit(NEW).run
""",
    "item getter": "GET = operator.itemgetter(int(NEW))\ndef edit(gm): return GET(range(9))",
    "random numbers": "R = random.Random(NEW)\ndef edit(gm): return R.random()",
    "operator": """
@graft.op("fingerprint::scaled")
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * NEW
def edit(gm): return scaled(torch.ones(())).item()
""",
    "torch's operator": """
@torch.library.custom_op("fingerprint::torchs", mutates_args=())
def torchs(x: torch.Tensor) -> torch.Tensor:
    return x * NEW
def edit(gm): return torchs(torch.ones(())).item()
""",
}
HEAD = """
import collections, enum, functools, operator, os, pathlib, random
import torch
import torchgraft as graft
"""


Version = Callable[[str, str], ModuleType]


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(text: str, new: str) -> ModuleType:
        modules = {
            "edited": HEAD + text,
            "edited_a": "import edited_b\ndef k(): return edited_b.k()\n",
            "edited_b": "def k(): return NEW\n",
        }
        for name, source in modules.items():
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(source.replace("NEW", new))
        importlib.invalidate_caches()
        return importlib.import_module("edited")

    return load


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_the_fingerprint(version: Version, name: str) -> None:
    with graft.Registry():
        first = version(EDITS[name], "2.0").edit
        before, value = fingerprint(first), first(None)
    with graft.Registry():
        assert fingerprint(version(EDITS[name], "2.0").edit) == before
    with graft.Registry():
        second = version(EDITS[name], "5.0").edit
        assert fingerprint(second) != before
        assert second(None) != value  # so the edit was one


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def edit(a, b): return a", "def edit(a, *, b): return a"),
        ("def edit(a, b): return a", "def edit(a, /, b): return a"),
        (
            "def edit(x):\n    try:\n        a(x)\n        b(x)\n    except E: pass",
            "def edit(x):\n    try:\n        a(x)\n    except E: pass\n    b(x)",
        ),
    ],
)
def test_code_is_more_than_its_instructions(version: Version, one: str, other: str) -> None:
    assert fingerprint(version(one, "").edit) != fingerprint(version(other, "").edit)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def edit(gm): return globals()['K']", "edit reads a name that is made up as it runs"),
        ("def edit(gm): return eval('K')", "edit reads a name that is made up as it runs"),
        ("def edit(gm): return os.environ['K']", "edit reads the environment"),
        ("def edit(gm): return open('k').read()", "edit reads a file"),
        ("def edit(gm): return pathlib.Path('k').read_text()", "edit reads a file"),
        ("def edit(gm):\n    import no_such_module", "imports no_such_module, which is not there"),
        (
            "import importlib\ndef edit(gm): return importlib.import_module('k')",
            "edit reads a module that is named as it runs",
        ),
        ("import io\nS = io.StringIO('k')\ndef edit(gm): return S", "a StringIO cannot be told"),
        ("import threading\nL = threading.local()\ndef edit(gm): return L", "a _local cannot"),
        (
            "class Link:\n    def __init__(self): self.all = {self}\n"
            "L = Link()\ndef edit(gm): return L",
            "it reaches too far",
        ),
    ],
)
def test_what_cannot_be_known_is_said(version: Version, text: str, why: str) -> None:
    with pytest.raises(Unknowable, match=re.escape(why)):
        fingerprint(version(text, "").edit)


def test_a_name_that_a_module_has_itself_is_not_a_builtin(version: Version) -> None:
    text = "def open(k): return k\ndef edit(gm): return gm.eval() or open(NEW)"
    assert fingerprint(version(text, "2.0").edit) != fingerprint(version(text, "5.0").edit)
