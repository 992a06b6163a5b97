"""Runs of numflow's kernels on the PTX interpreter of tests/cuda/ptx: `make ptx`."""
