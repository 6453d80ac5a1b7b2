"""TorchAir under the path that it has inside torch_npu."""

import sys

import torchair

for _name, _module in list(sys.modules.items()):
    if _name == "torchair" or _name.startswith("torchair."):
        sys.modules[f"{__name__}.{_name}"] = _module

__all__ = ["torchair"]
