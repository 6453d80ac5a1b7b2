from torchair._ge_concrete_graph.supported_declaration import *  # noqa: F403
from torchair._ge_concrete_graph.supported_declaration import __all__ as __all__
