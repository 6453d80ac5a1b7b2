from torchair.ge_concrete_graph.fx2ge_converter import *  # noqa: F403
from torchair.ge_concrete_graph.fx2ge_converter import __all__ as __all__
