"""Operators of op-plugin projects off an NPU: `build` keeps them in a folder, `load` declares them.

The folder holds copies of the YAML files and the prototypes, the libraries made of C++ kernels,
and a manifest in JSON with the hash of each. Nothing in it is a pickle.
"""

from torchgraft.op.plugin.store import FOLDER, Built, Loaded, build, load

__all__ = ["FOLDER", "Built", "Loaded", "build", "load"]
