from torchair._ge_concrete_graph.compat_ir import *  # noqa: F403
from torchair._ge_concrete_graph.compat_ir import __all__ as __all__
