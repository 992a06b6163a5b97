"""The kernels of numflow on the machine of tests/cuda/ptx: `make ptx`."""
