"""Graft your own operators, converters, graph rewrites and streams onto PyTorch."""

from torchgraft.backend import backend
from torchgraft.compile import Compiled, compile
from torchgraft.config import Config
from torchgraft.errors import GraftError
from torchgraft.fx.edit import Graph
from torchgraft.inputs import Input
from torchgraft.op.check import check
from torchgraft.op.declare import load_prototypes
from torchgraft.op.define import Op, op
from torchgraft.op.samples import Make
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
    "Make",
    "Op",
    "Plan",
    "Registry",
    "Report",
    "backend",
    "check",
    "compile",
    "fx_pass",
    "load_prototypes",
    "op",
    "reports",
]
