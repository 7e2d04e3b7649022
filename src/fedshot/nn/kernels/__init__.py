"""C kernels for CPUs, and the functions that call them."""
