"""Access to the states of sequences from kernels."""

from numflow.cpu.runtime.access import i32_ptr, i64
from numflow.cpu.runtime.kernel import POSITIONS, STARTS, STATE_SLOTS
from numflow.cpu.simd.vector import inline


@inline
def slot_of(header, sequence, addresses, stride):
    """Address of a sequence's slot. addresses, stride: attributes of a StateMemory."""
    return i64(addresses, 0) + i32_ptr(i64(header, STATE_SLOTS))[sequence] * stride


@inline
def first_row(header, sequence):
    """The first row of a sequence; first_row(sequence + 1) is the end of its rows."""
    return i32_ptr(i64(header, STARTS))[sequence]


@inline
def begins(header, row):
    """True if a sequence's first row is at position 0, so that its state is zeros."""
    return i32_ptr(i64(header, POSITIONS))[row] == 0
