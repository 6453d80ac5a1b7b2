"""Graft your own operators, converters, graph rewrites and streams onto PyTorch."""

from torchgraft.backend import backend
from torchgraft.compile import Compiled, compile
from torchgraft.config import Config
from torchgraft.convert.define import converter, converters_for
from torchgraft.convert.net import Net, Value
from torchgraft.errors import Declined, GraftError
from torchgraft.fx.edit import Graph
from torchgraft.fx.mark import fallback
from torchgraft.inputs import Input
from torchgraft.op.check import check
from torchgraft.op.declare import load_prototypes
from torchgraft.op.define import Op, op
from torchgraft.op.samples import Make
from torchgraft.passes.registry import Registry
from torchgraft.passes.spec import fx_pass
from torchgraft.plan import Plan
from torchgraft.report import Report, reports
from torchgraft.verify.bisect import bisect
from torchgraft.verify.watch import verify

__version__ = "0.1.0"

__all__ = [
    "Compiled",
    "Config",
    "Declined",
    "GraftError",
    "Graph",
    "Input",
    "Make",
    "Net",
    "Op",
    "Plan",
    "Registry",
    "Report",
    "Value",
    "backend",
    "bisect",
    "check",
    "compile",
    "converter",
    "converters_for",
    "fallback",
    "fx_pass",
    "load_prototypes",
    "op",
    "reports",
    "verify",
]
