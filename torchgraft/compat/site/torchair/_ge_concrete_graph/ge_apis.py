from torchair.ge_concrete_graph.ge_apis import *  # noqa: F403
from torchair.ge_concrete_graph.ge_apis import __all__ as __all__
from torchair.ge_concrete_graph.ge_apis import __getattr__ as __getattr__
