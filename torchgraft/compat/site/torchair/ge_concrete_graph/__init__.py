"""The older paths of TorchAir's names."""
