"""Plain twins of the hardest kernels: the same numbers in a screen of NumPy, without options."""
