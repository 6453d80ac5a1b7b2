import torch

__version__ = torch.__version__.split("+")[0]
cann = None
git_version = "Unknown"
