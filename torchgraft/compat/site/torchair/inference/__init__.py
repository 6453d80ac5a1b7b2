from torchgraft.compat.air.inference import cache_compile, readable_cache, set_dim_gears

__all__ = ["cache_compile", "readable_cache", "set_dim_gears"]
