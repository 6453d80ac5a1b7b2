"""Graft your own operators, converters, graph rewrites and streams onto PyTorch."""

import os

from torchgraft.backend import backend
from torchgraft.compile import Compiled, compile
from torchgraft.config import Config
from torchgraft.convert.define import converter, converters_for
from torchgraft.convert.net import Net, Value
from torchgraft.errors import Declined, GraftError, NoMatch
from torchgraft.fx.edit import Graph
from torchgraft.fx.mark import fallback, stream
from torchgraft.inputs import Input
from torchgraft.inspect import logs
from torchgraft.op.check import check
from torchgraft.op.declare import load_prototypes
from torchgraft.op.define import Op, op
from torchgraft.op.load import load_ops
from torchgraft.op.samples import Make
from torchgraft.package import script as _script  # noqa: F401 (registers torchgraft::run_engine)
from torchgraft.package.cache import explain_miss
from torchgraft.package.load import load
from torchgraft.passes import fusions
from torchgraft.passes.pattern.define import pattern
from torchgraft.passes.pattern.explain import explain_match
from torchgraft.passes.pattern.rewrite import Match
from torchgraft.passes.registry import Registry
from torchgraft.passes.spec import fx_pass
from torchgraft.plan import Plan
from torchgraft.report import Report, reports
from torchgraft.rows import Rows
from torchgraft.simulate import Cluster, Link, simulate
from torchgraft.verify.bisect import bisect
from torchgraft.verify.watch import verify

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Compiled",
    "Config",
    "Declined",
    "GraftError",
    "Graph",
    "Input",
    "Link",
    "Make",
    "Match",
    "Net",
    "NoMatch",
    "Op",
    "Plan",
    "Registry",
    "Report",
    "Rows",
    "Value",
    "backend",
    "bisect",
    "check",
    "compile",
    "converter",
    "converters_for",
    "explain_match",
    "explain_miss",
    "fallback",
    "fusions",
    "fx_pass",
    "load",
    "load_ops",
    "load_prototypes",
    "op",
    "pattern",
    "reports",
    "simulate",
    "stream",
    "verify",
]

logs.configure(os.environ.get("TORCHGRAFT_LOGS"))
