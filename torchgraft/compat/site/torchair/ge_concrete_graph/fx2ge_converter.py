from torchgraft.compat.air.convert import declare_supported, register_fx_node_ge_converter

__all__ = ["declare_supported", "register_fx_node_ge_converter"]
