"""How a device keeps a matrix [N, K]: rows one after the other, each on a 16-byte boundary."""

from dataclasses import dataclass

import numpy as np

from numflow.cuda.device import Device, Ref
from numflow.cuda.operand import padded
from numflow.errors import NetworkError
from numflow.formats.types import TYPES, to_f32
from numflow.network.weights import RawMatrix

FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class Matrix:
    """A matrix in device memory. kind: which kernels serve it; type: as in the file; pitch: columns with padding.

    groups: number of equal matrices stacked along N (experts).
    """

    kind: str
    type: str
    shape: tuple[int, int]
    groups: int
    codes: Ref
    pitch: int
    nbytes: int
    expanded_from: str | None = None


def upload(raw: RawMatrix, device: Device) -> Matrix:
    """Bring a stored matrix [N, K] to a device.

    Raises:
        NetworkError: the stored rows do not fit the shape and the type.
        FormatError: a type that nothing can expand.
    """
    n, columns = raw.shape
    if n % raw.groups or raw.rows.shape[0] != n:
        raise NetworkError(f"matrix {raw.name!r} of shape {list(raw.shape)} in {raw.groups} groups has "
                           f"{raw.rows.shape[0]} stored rows")
    rows, kind = raw.rows, FLOATS.get(raw.type)
    if kind is None:
        rows, kind = np.ascontiguousarray(to_f32(rows, raw.type), np.float32).view(np.uint8), "f32"
    elif rows.shape[1] != TYPES[raw.type].row_bytes(columns):
        raise NetworkError(f"matrix {raw.name!r}: rows of {rows.shape[1]} bytes, not {columns} {raw.type} numbers")
    size, pitch = 4 if kind == "f32" else 2, padded(columns)
    memory = device.alloc(n * pitch * size)
    if pitch == columns:
        device.upload(memory.at(), rows)
    else:
        whole = np.zeros((n, pitch * size), np.uint8)
        whole[:, :columns * size] = rows
        device.upload(memory.at(), whole)
    return Matrix(kind, raw.type, raw.shape, raw.groups, memory.at(), pitch, memory.nbytes,
                  None if raw.type in FLOATS else raw.type)
