from typing import Any

from torchgraft.compat import refused


def __getattr__(name: str) -> Any:
    return refused.refuse("torchair.tools.gegraph_check.filter_operators", name)
