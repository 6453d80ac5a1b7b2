from torchair.ge_concrete_graph.ge_ir_pb2 import *  # noqa: F403
from torchair.ge_concrete_graph.ge_ir_pb2 import __all__ as __all__
