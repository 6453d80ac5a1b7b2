"""TorchAir's names over torchgraft."""
