"""Graft your own operators, converters, graph rewrites and streams onto PyTorch."""

from torchgraft.backend import backend
from torchgraft.compile import Compiled, compile
from torchgraft.config import Config
from torchgraft.errors import GraftError, NoMatch
from torchgraft.fx.edit import Graph
from torchgraft.inputs import Input
from torchgraft.passes import fusions
from torchgraft.passes.pattern.define import pattern
from torchgraft.passes.pattern.explain import explain_match
from torchgraft.passes.pattern.rewrite import Match
from torchgraft.passes.registry import Registry
from torchgraft.passes.spec import fx_pass
from torchgraft.plan import Plan
from torchgraft.report import Report, reports

__version__ = "0.1.0"

__all__ = [
    "Compiled",
    "Config",
    "GraftError",
    "Graph",
    "Input",
    "Match",
    "NoMatch",
    "Plan",
    "Registry",
    "Report",
    "backend",
    "compile",
    "explain_match",
    "fusions",
    "fx_pass",
    "pattern",
    "reports",
]
