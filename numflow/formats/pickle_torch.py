"""Torch objects of a pickle as plain data: storages (ranges of a file) and tensors (strided views of storages)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import MappedFile, show
from numflow.formats.pickle_machine import Global
from numflow.formats.types import TYPES

# Limit of elements in a tensor that repeats elements (stride 0), so that a small file cannot create a huge tensor.
MAX_REPEATED = 2**24

_STORAGE_TYPES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
                  "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
                  "ByteStorage": "U8", "BoolStorage": "BOOL", "UntypedStorage": "U8"}
_DTYPES = {"float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
           "bfloat16": "BF16", "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16",
           "short": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
           "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}


@dataclass(frozen=True)
class TypeName:
    """The tensor type of a torch dtype or storage class."""

    name: str


@dataclass(frozen=True)
class Storage:
    """A flat array in the file, identified by `key`: `count` elements of type `kind` from element `first` on."""

    key: str
    kind: str
    count: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * TYPES[self.kind].size


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a storage; offset and strides in elements of `kind`."""

    storage: Storage
    kind: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and step != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True


def storage(key: Any) -> tuple[Storage, Storage]:
    """The storage of a persistent id, and the referenced part of it (only in the older format).

    Raises:
        ValueError: not a torch storage id.
    """
    if not (isinstance(key, tuple) and len(key) in (5, 6) and key[0] == "storage"):
        raise ValueError("a persistent id that is not a torch storage")
    _, kind, name, _, count, *rest = key
    if not isinstance(kind, TypeName) or not isinstance(name, str) or not _is_size(count):
        raise ValueError("a torch storage must have a type, a key and a size")
    whole = Storage(name, kind.name, count)
    if rest in ([], [None]):
        return whole, whole
    view = rest[0]
    if not (isinstance(view, tuple) and len(view) == 3 and _is_size(view[1]) and _is_size(view[2])
            and view[1] + view[2] <= count):
        raise ValueError("a part of a torch storage lies outside it")
    return whole, Storage(name, kind.name, count=view[2], first=view[1])


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**60


def _rebuild_tensor(stored: Any, offset: Any, shape: Any, stride: Any, *rest: Any, kind: str | None = None):
    """torch._utils._rebuild_tensor and _v2; other arguments (gradients, hooks, metadata) are ignored.

    Raises:
        ValueError: not a storage and sizes, or elements outside the storage.
    """
    if not isinstance(stored, Storage) or not _is_size(offset):
        raise ValueError("a tensor needs a storage and an offset")
    for sizes in (shape, stride):
        if not isinstance(sizes, tuple) or len(sizes) > 32 or not all(map(_is_size, sizes)):
            raise ValueError("shape and stride of a tensor must be tuples of sizes")
    if len(shape) != len(stride):
        raise ValueError(f"shape {show(shape)} and stride {show(stride)} differ in length")
    kind = kind or stored.kind
    available = stored.nbytes // TYPES[kind].size
    count = math.prod(shape)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride)) + 1 if count else offset
    if last > available:
        raise ValueError(f"a tensor of shape {show(shape)} needs element {last - 1} of a storage with {available}")
    if count > max(available, MAX_REPEATED):
        raise ValueError(f"a tensor of shape {show(shape)} repeats the {available} elements of its storage too often")
    return StoredTensor(stored, kind, offset, shape, stride)


def _rebuild_tensor_v3(stored, offset, shape, stride, requires_grad, hooks, dtype, metadata=None):
    if not isinstance(dtype, TypeName):
        raise ValueError("a tensor needs a dtype")
    return _rebuild_tensor(stored, offset, shape, stride, kind=dtype.name)


def _rebuild_parameter(tensor, *rest):
    if not isinstance(tensor, StoredTensor):
        raise ValueError("a parameter needs a tensor")
    return tensor


def _rebuild_from_type(function, _type, args, _state):
    """A tensor with Python attributes, which are ignored."""
    if function not in (_rebuild_tensor, _rebuild_tensor_v3) or not isinstance(args, tuple):
        raise ValueError("not a tensor")
    return function(*args)


def _ordered_dict(pairs=()):
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise ValueError("an ordered dictionary needs pairs")
    return {key: value for key, value in pairs if isinstance(key, str)}


def _size(sizes=()):
    if not isinstance(sizes, list | tuple) or not all(map(_is_size, sizes)):
        raise ValueError("torch.Size needs sizes")
    return tuple(sizes)


def _inert(*_):
    """None: device and layout of a saved tensor are ignored."""


KNOWN: dict[Global, Any] = {
    Global("collections", "OrderedDict"): _ordered_dict,
    Global("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    Global("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    Global("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    Global("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    Global("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    Global("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    Global("torch.nn.parameter", "Parameter"): _rebuild_parameter,
    Global("torch", "Tensor"): None,
    Global("torch", "Size"): _size,
    Global("torch", "device"): _inert,
    Global("torch.serialization", "_get_layout"): _inert,
    **{Global(module, name): TypeName(kind) for name, kind in _STORAGE_TYPES.items()
       for module in ("torch", "torch.storage", "torch.cuda")},
    **{Global("torch", name): TypeName(kind) for name, kind in _DTYPES.items()},
}


def to_tensor(file: MappedFile, name: str, stored: StoredTensor, start: int) -> Tensor:
    """The tensor of a storage whose data begins at offset `start`. Contiguous tensors are views of the file.

    Raises:
        FormatError: data beyond the end of the file.
    """
    kind, whole = TYPES[stored.kind], stored.storage
    start += whole.first * TYPES[whole.kind].size
    if start + whole.nbytes > file.size:
        raise file.fail(f"tensor {show(name)}: its storage needs bytes {start} to {start + whole.nbytes}, "
                        f"the file has {file.size} (is it truncated?)")
    if stored.is_contiguous:
        return file.tensor(name, stored.shape, kind, start + stored.offset * kind.size)
    rows, row_bytes = math.prod(stored.shape[:-1]), kind.row_bytes(stored.shape[-1])
    strides = [step * kind.size if size > 1 else 0 for size, step in zip(stored.shape, stored.stride)]

    def read_strided() -> np.ndarray:
        flat = file.data[start:start + whole.nbytes // kind.size * kind.size].view(f"u{kind.size}")
        view = np.lib.stride_tricks.as_strided(flat[stored.offset:], stored.shape, strides, writeable=False)
        raw = np.ascontiguousarray(view).view(np.uint8).reshape(rows, row_bytes)
        raw.flags.writeable = False
        return raw

    return Tensor(name, stored.shape, kind, read_strided)
