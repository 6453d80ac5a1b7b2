from torchair.configs import compiler_config

__all__ = ["compiler_config"]
