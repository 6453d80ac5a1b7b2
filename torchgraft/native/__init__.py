"""The C++ part: built with CMake on first use, kept by content and torch version.

`build("runtime")` gives the root of what C++ programs build against; `torchgraft native` prints it.
"""

from torchgraft.native.driver import Root, build

__all__ = ["Root", "build"]
