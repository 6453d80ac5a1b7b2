from torchgraft.compat.air.log import EVENT_LEVEL, logger

__all__ = ["EVENT_LEVEL", "logger"]
