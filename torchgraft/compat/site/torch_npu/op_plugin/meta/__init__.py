"""Meta kernels of operators."""
