"""Checkpoints quantised by other programs (GPTQ, AWQ, FP8, ...), behind the interface of plain checkpoints.

    readable(config, tensors, folder, file_of)     # tensors by plain names, the configuration without it, the method

Each format stores a matrix as several tensors: codes and scales, some also zero points and a column order. Here a
matrix becomes one tensor with its plain name and shape, in a type of numflow.formats.types, so that specs, networks and
executors need no special cases. Data is read on demand, except small tensors that determine the type.
"""
