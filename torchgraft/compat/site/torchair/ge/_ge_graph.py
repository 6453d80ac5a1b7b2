from torchair.ge_concrete_graph.ge_graph import *  # noqa: F403
from torchair.ge_concrete_graph.ge_graph import __all__ as __all__
