from torchair.core import utils

__all__ = ["utils"]
