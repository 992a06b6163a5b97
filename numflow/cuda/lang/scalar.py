"""The types of values in kernels: scalars, and pointers to them.

`u32(x)` in a kernel is a conversion, on the simulator as on the device: integers wrap around, floats are rounded. As
the annotation of a kernel parameter, `u32` is a scalar, and `u32.ptr` a pointer to device memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Scalar:
    """A scalar type. numba: the type's name in numba.types."""

    name: str
    dtype: np.dtype
    numba: str
    convert: Callable = field(repr=False, compare=False)

    def __call__(self, value):
        return self.convert(value)

    @property
    def ptr(self) -> "Pointer":
        """The type of a pointer to values of this type."""
        return Pointer(self)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class Pointer:
    """The type of a pointer into device memory."""

    to: Scalar


def _unsigned(bits: int) -> Callable:
    mask = (1 << bits) - 1
    return lambda value: int(value) & mask


def _signed(bits: int) -> Callable:
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    return lambda value: ((int(value) + half) & mask) - half


f32 = Scalar("f32", np.dtype(np.float32), "float32", np.float32)
f64 = Scalar("f64", np.dtype(np.float64), "float64", np.float64)
i32 = Scalar("i32", np.dtype(np.int32), "int32", _signed(32))
i8 = Scalar("i8", np.dtype(np.int8), "int8", _signed(8))
u8 = Scalar("u8", np.dtype(np.uint8), "uint8", _unsigned(8))
u16 = Scalar("u16", np.dtype(np.uint16), "uint16", _unsigned(16))
u32 = Scalar("u32", np.dtype(np.uint32), "uint32", _unsigned(32))
u64 = Scalar("u64", np.dtype(np.uint64), "uint64", _unsigned(64))
