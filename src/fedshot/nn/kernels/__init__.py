"""The C kernels and the functions that call them."""
