"""Where older releases keep the Meta kernels of operators."""
