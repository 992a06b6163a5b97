"""The stored tensors of a quantised checkpoint, with checked access."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from numflow.errors import FormatError
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.method import Method
from numflow.formats.types import TYPES, to_f32

SCALES = ("F16", "BF16", "F32")
POWERS = ("U8", "F8_E8M0")  # exponents of power-of-two scales
STEPS = ("F8_E4M3", *POWERS)   # scales per 16 or 32 columns of 4-bit floats
WORDS = ("I32", "U32")
FLOATS8 = ("F8_E4M3", "F8_E5M2")
_NUMPY = {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U8": "u1", "U16": "<u2", "U32": "<u4", "BOOL": "u1"}


class StoredParts:
    """Tensors by stored name. used: names of tensors that belong to a matrix or can be ignored."""

    def __init__(self, tensors: Mapping[str, Tensor], file_of: Callable[[str], Path], method: Method):
        self.tensors, self.file_of, self.method = tensors, file_of, method
        self.used: set[str] = set()

    def get(self, name: str) -> Tensor | None:
        """A tensor, which is marked as used; None if missing."""
        if name in self.tensors:
            self.used.add(name)
        return self.tensors.get(name)

    def need(self, name: str, types: Sequence[str], *shapes: Sequence[int], beside: str) -> Tensor:
        """A tensor of one of these types and shapes (any shape, if none is given).

        Raises:
            FormatError: names the tensor, the expectation, and the tensor `beside` that needs it.
        """
        tensor = self.get(name)
        wanted = f"{' or '.join(types)} {' or '.join(str(list(shape)) for shape in shapes)}".rstrip()
        if tensor is None:
            raise self.fail(beside, f"needs {show(name)} ({wanted}), which is not there")
        if tensor.type.name not in types or (shapes and tensor.shape not in [tuple(shape) for shape in shapes]):
            raise self.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected {wanted}")
        return tensor

    def fail(self, name: str, message: str) -> FormatError:
        """A FormatError about a tensor, for the caller to raise."""
        return FormatError(f"{self.file_of(name)}: tensor {show(name)}: {message} [{self.method}]")


def integers(tensor: Tensor) -> np.ndarray:
    """Stored integers, in the tensor's shape."""
    return np.ascontiguousarray(tensor.raw()).view(_NUMPY[tensor.type.name]).reshape(tensor.shape)


def stored_bytes(tensor: Tensor) -> np.ndarray:
    """All bytes, u8 [n]."""
    return np.ascontiguousarray(tensor.raw()).reshape(-1)


def scale_values(tensor: Tensor) -> np.ndarray:
    """Scales as float32, in the tensor's shape; U8 scales are exponents of two with bias 127.

    Raises:
        FormatError: a type that cannot be expanded.
    """
    if tensor.type.name == "U8":
        return Tensor(tensor.name, tensor.shape, TYPES["F8_E8M0"], tensor.read).f32()
    return tensor.f32()


def some_scales(tensor: Tensor, rows: slice | np.ndarray, columns: slice | None = None) -> np.ndarray:
    """Scales of some rows and columns, float32 [n, m]; other elements are not converted. Types: `SCALES`."""
    raw = tensor.raw()[rows]
    if columns is not None:
        width = tensor.type.row_bytes(1)
        raw = raw[:, columns.start * width:columns.stop * width]
    return to_f32(np.ascontiguousarray(raw), tensor.type.name)
