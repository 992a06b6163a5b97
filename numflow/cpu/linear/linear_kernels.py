"""Factories of the kernels of `linear` and `expert_linear`, for a scheme of layout.py and int8 activations or not."""

from numflow.cpu.linear import walk as linear_walk
from numflow.cpu.linear.tile import scheme

_linear, _expert_linear = linear_walk.linear, linear_walk.expert_linear


def linear(name, int8):
    """As linear_walk.linear."""
    def kernel(args, thread, n_threads):
        _linear(args, thread, n_threads, scheme(name, int8))
    return kernel


def expert_linear(name, int8):
    """As linear_walk.expert_linear."""
    def kernel(args, thread, n_threads):
        _expert_linear(args, thread, n_threads, scheme(name, int8))
    return kernel
