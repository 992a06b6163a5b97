"""The executor for NVIDIA GPUs; docs/cuda.md says how it is built."""
