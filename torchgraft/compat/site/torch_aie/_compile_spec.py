from torchgraft.compat.aie.spec import SUPPORT_SOC_NAME

__all__ = ["SUPPORT_SOC_NAME"]
