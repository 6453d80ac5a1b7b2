from torchgraft.compat.air.gears import set_dim_gears
from torchgraft.compat.air.inference import cache_compile, readable_cache

__all__ = ["cache_compile", "readable_cache", "set_dim_gears"]
