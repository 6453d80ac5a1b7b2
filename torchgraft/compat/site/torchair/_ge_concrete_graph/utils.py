from torchair.ge_concrete_graph.utils import *  # noqa: F403
from torchair.ge_concrete_graph.utils import __all__ as __all__
