"""States of sequences, from inside kernels."""

from numflow.cpu.runtime.access import i32_ptr, i64
from numflow.cpu.runtime.kernel import POSITIONS, STARTS, STATE_SLOTS
from numflow.cpu.simd.vector import inline


@inline
def slot_of(header, sequence, addresses, stride):
    """Address of a sequence's slot. addresses, stride: of a StateMemory."""
    return i64(addresses, 0) + i32_ptr(i64(header, STATE_SLOTS))[sequence] * stride


@inline
def first_row(header, sequence):
    """The first row of a sequence; that of the next one is behind its last."""
    return i32_ptr(i64(header, STARTS))[sequence]


@inline
def begins(header, row):
    """1 where a sequence's first row begins its text, so that its state is zeros."""
    return i32_ptr(i64(header, POSITIONS))[row] == 0
