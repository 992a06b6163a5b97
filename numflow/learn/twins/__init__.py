"""Plain twins of the hardest kernels: the same computation in one screen of NumPy, without options."""
