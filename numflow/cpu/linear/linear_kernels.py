"""Factories of the kernels of `linear` and `expert_linear`, for a scheme of layout.py, an operand kind, and whether
rows end with half a unit (ragged)."""

from numflow.cpu.linear import walk as linear_walk
from numflow.cpu.linear.kinds import scheme

_linear, _expert_linear = linear_walk.linear, linear_walk.expert_linear


def linear(name, operand, ragged):
    """As linear_walk.linear."""
    def kernel(args, thread, n_threads):
        _linear(args, thread, n_threads, scheme(name, operand, ragged))
    return kernel


def expert_linear(name, operand, ragged):
    """As linear_walk.expert_linear."""
    def kernel(args, thread, n_threads):
        _expert_linear(args, thread, n_threads, scheme(name, operand, ragged))
    return kernel
