"""safetensors reader. A file has an 8-byte header length, a JSON header, then contiguous tensor data.

F4 tensors, with two floats per byte, are read as U8 with half as many columns.
"""

from pathlib import Path
from typing import Any

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import MappedFile, parse_json, show
from numflow.formats.types import TYPES

MAX_HEADER_BYTES = 100_000_000

DTYPES = {name: TYPES[name] for name in (
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0",
    "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")}


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file in data order. Raises: FormatError, as `read_with_metadata`."""
    return read_with_metadata(path)[0]


def read_with_metadata(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file in data order, and the text entries of its __metadata__.

    Raises:
        FormatError: names file, tensor and field.
    """
    file = MappedFile(path)
    header, start = _header(file)
    entries = [(*_offsets(file, name, entry), name, entry) for name, entry in header.items() if name != "__metadata__"]
    entries.sort(key=lambda e: e[:2])
    tensors: dict[str, Tensor] = {}
    position = 0
    for begin, end, name, entry in entries:
        if begin != position:
            raise file.fail(f"tensor {show(name)}: data_offsets begin at {begin}, expected {position}: "
                            f"tensors must follow each other without gap or overlap")
        file.check_name(name, tensors)
        tensor = file.tensor(name, _shape(file, name, entry), _type(file, name, entry), start + begin)
        if tensor.nbytes != end - begin:
            raise file.fail(f"tensor {show(name)}: {tensor.type.name} {list(tensor.shape)} takes "
                            f"{tensor.nbytes} bytes, data_offsets span {end - begin}")
        tensors[name] = tensor
        position = end
    if start + position != file.size:
        raise file.fail(f"the header describes {start + position} bytes, the file has {file.size}")
    metadata = header.get("__metadata__") or {}
    return tensors, {key: value for key, value in metadata.items() if isinstance(value, str)}


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the tensor data."""
    if file.size < 8:
        raise file.fail(f"{file.size} bytes, too short for a safetensors header")
    length = int.from_bytes(file.bytes(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise file.fail(f"header length {length}, at most {MAX_HEADER_BYTES} is allowed")
    if length > file.size - 8:
        raise file.fail(f"header length {length}, but only {file.size - 8} bytes follow (is it truncated?)")
    header = parse_json(file.bytes(8, length), f"{file.path}: header", unique_keys=True)
    if not isinstance(header.get("__metadata__"), dict | None):  # MLX writes null for none
        raise file.fail("header: __metadata__ must be an object")
    return header, 8 + length


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _offsets(file: MappedFile, name: str, entry: Any) -> tuple[int, int]:
    if not isinstance(entry, dict):
        raise file.fail(f"tensor {show(name)}: expected an object, got {type(entry).__name__}")
    offsets = entry.get("data_offsets")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))
            and offsets[0] <= offsets[1]):
        raise file.fail(f"tensor {show(name)}: data_offsets must be [begin, end], got {show(offsets)}")
    return offsets[0], offsets[1]


def _shape(file: MappedFile, name: str, entry: dict[str, Any]) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not (isinstance(shape, list) and all(map(_is_size, shape))):
        raise file.fail(f"tensor {show(name)}: shape must be a list of sizes, got {show(shape)}")
    if entry.get("dtype") == "F4":
        if not shape or shape[-1] % 2:
            raise file.fail(f"tensor {show(name)}: F4 {show(shape)} is no whole number of bytes in a row")
        shape = [*shape[:-1], shape[-1] // 2]
    return tuple(shape)


def _type(file: MappedFile, name: str, entry: dict[str, Any]):
    dtype = entry.get("dtype")
    if dtype == "F4":
        return TYPES["U8"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise file.fail(f"tensor {show(name)}: dtype {show(dtype)} is not supported; known: {', '.join(DTYPES)}")
    return DTYPES[dtype]
