"""Checkpoints of weights that other programs have quantised, behind the interface of plain ones.

    readable(config, tensors, folder, file_of)     # tensors by plain names, the configuration without it, the method

Each format stores a matrix as codes with scales, some with zeros and an order of columns, under names of its own. Here
a matrix becomes one tensor of its plain name and shape again, in a type of numflow.formats.types, so that
specifications, networks and executors meet tensors as in any other file. Nothing is read before such a tensor is asked
for, but what is small and decides on types.
"""
