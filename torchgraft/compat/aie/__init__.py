"""The names of Torch-AIE and MindIE-Torch over torchgraft."""
