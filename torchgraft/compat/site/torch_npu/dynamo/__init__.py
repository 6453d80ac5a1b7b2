"""TorchAir under the path that it has inside torch_npu."""

import sys

import torchair

sys.modules[f"{__name__}.torchair"] = torchair

__all__ = ["torchair"]
