"""A PTX interpreter in NumPy that checks kernels for errors. README.md in this folder says how to use it."""
