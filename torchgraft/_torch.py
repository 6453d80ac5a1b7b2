"""The only file that imports private torch modules: one function per need, torch 2.11 to 2.13.

Everything else in torchgraft speaks public torch. When a torch release moves one of these, this
is the one file to mend; each function says what it gives, not how torch spells it.
"""

from __future__ import annotations
