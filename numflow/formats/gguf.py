"""GGUF reader. A file has a header with typed metadata, a table of tensors, then aligned tensor data.

    "GGUF" | version u32 | tensors u64 | pairs u64 | pair* | tensor* | padding | data
    pair:    key str, type u32, value                     str: length u64, UTF-8 bytes
    tensor:  name str, dims u32, dim u64* (innermost first), type u32, offset u64 (from the start of data)

Version 1 has u32 instead of u64. A model may be split into files "...-00001-of-00003.gguf".
"""

import bisect
import itertools
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import MappedFile, show
from numflow.formats.types import GGML_NAMES, GGML_REMOVED, TYPES

VERSIONS = (1, 2, 3)
MAX_DIMS = 4
MAX_SPLITS = 10_000
# Limits of metadata lists, which take up to ten times their file size in memory; vocabularies have below 2^20 entries.
MAX_ARRAY = 2**22
MAX_ITEMS = 2**23
MAX_DEPTH = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
            12: "<f8"}
# GGUF files that are no models: key and value, and the message.
_NO_MODELS = {
    ("general.type", "adapter"): "an adapter, not a model: --adapter takes it, beside a model",
    ("general.type", "imatrix"): "an imatrix, not a model: --imatrix of `numflow quantize` takes it",
    ("general.type", "mmproj"): "the part of a model that reads images or sound, which numflow does not run",
    ("general.architecture", "clip"): "the part of a model that reads images or sound, which numflow does not run",
    ("general.architecture", "controlvector"): "a control vector, not a model; numflow has no use for it",
}
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class _Reader:
    """A cursor over the header. Each read is checked against the file size before memory is allocated."""

    def __init__(self, file: MappedFile):
        self.file = file
        self.position = 0
        self.budget = MAX_ITEMS
        self.length = struct.Struct("<Q")

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes; returns the former position."""
        start = self.position
        if count > self.file.size - start:
            raise self.file.fail(f"{what}: {count} bytes at {start}, but the file ends at {self.file.size} "
                                 f"(is it truncated?)")
        self.position = start + count
        return start

    def number(self, code: str, what: str) -> Any:
        return np.frombuffer(self.file.map, code, 1, self.take(np.dtype(code).itemsize, what)).item()

    def size(self, what: str) -> int:
        return self.length.unpack_from(self.file.map, self.take(self.length.size, what))[0]

    def string(self, what: str) -> str:
        count = self.size(what)
        start = self.take(count, what)
        return self.decode(start, start + count, what)

    def decode(self, start: int, end: int, what: str) -> str:
        try:
            return self.file.map[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self.file.fail(f"{what}: text at byte {start} is not valid UTF-8") from None

    def spend(self, count: int, smallest: int, what: str) -> None:
        """Check that `count` items of at least `smallest` bytes fit in the rest of the file and in the item budget."""
        if count > (self.file.size - self.position) // smallest:
            raise self.file.fail(f"{what}: {count} entries cannot fit in the rest of the file (is it truncated?)")
        if count > MAX_ARRAY:
            raise self.file.fail(f"{what}: {count} entries, at most {MAX_ARRAY} are read")
        self.budget -= count
        if self.budget < 0:
            raise self.file.fail(f"{what}: the metadata has more than {MAX_ITEMS} items")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth)
        if kind not in _SCALARS:
            raise self.file.fail(f"{what}: unknown value type {kind}")
        return self.number(_SCALARS[kind], what)

    def array(self, what: str, depth: int) -> list:
        if depth >= MAX_DEPTH:
            raise self.file.fail(f"{what}: arrays nested more than {MAX_DEPTH} deep")
        kind, count = self.number("<u4", what), self.size(what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            self.spend(count, 4 + self.length.size, what)
            return [self.array(what, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.file.fail(f"{what}: unknown array element type {kind}")
        code = np.dtype(_SCALARS[kind])
        self.spend(count, code.itemsize, what)
        start = self.take(count * code.itemsize, what)
        return np.frombuffer(self.file.map, code, count, start).tolist() if count else []

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings. This is the hot loop (vocabularies), so the cursor is in local variables."""
        self.spend(count, self.length.size, what)
        data, unpack, step = self.file.map, self.length.unpack_from, self.length.size
        position, last = self.position, self.file.size - step
        found: list[str] = []
        try:
            for _ in range(count):
                if position > last:
                    break
                start = position + step
                position = start + unpack(data, position)[0]
                found.append(data[start:position].decode("utf-8"))
        except UnicodeDecodeError:
            raise self.file.fail(f"{what}: entry {len(found)} is not valid UTF-8") from None
        except OverflowError:
            position = self.file.size + 1
        if len(found) < count or position > self.file.size:
            raise self.file.fail(f"{what}: entry {max(len(found) - 1, 0)} of {count} ends after the file "
                                 f"(is it truncated?)")
        self.position = position
        return found


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[Path]]:
    """The tensors, the metadata (keys as stored, arrays as lists) and the files of a model.

    `path` may be any file of a split model; the others must be beside it.

    Raises:
        FormatError: naming the file, the key or tensor, and what was expected.
    """
    tensors, metadata = read_file(path)
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return tensors, metadata, [path]
    paths = _split_paths(path, count)
    merged: dict[str, Tensor] = {}
    first: dict[str, Any] = metadata
    for index, part in enumerate(paths):
        tensors, metadata = read_file(part)
        first = metadata if index == 0 else first
        if metadata.get("split.no") != index or metadata.get("split.count") != count:
            raise FormatError(f"{part}: split.no {show(metadata.get('split.no'))} of "
                              f"{show(metadata.get('split.count'))}, "
                              f"expected {index} of {count}")
        if twice := merged.keys() & tensors.keys():
            raise FormatError(f"{part}: tensor {show(min(twice))} is in an earlier file of the split too")
        merged |= tensors
    wanted = first.get("split.tensors.count", len(merged))
    if wanted != len(merged):
        raise FormatError(f"{path}: split.tensors.count is {show(wanted)}, the files have {len(merged)} tensors")
    return merged, first, paths


def no_model(metadata: dict[str, Any]) -> str:
    """Message for a file with this metadata that is no model; "" for models."""
    return next((message for (key, value), message in _NO_MODELS.items() if metadata.get(key) == value), "")


def _split_paths(path: Path, count: Any) -> list[Path]:
    if type(count) is not int or not 0 < count <= MAX_SPLITS:
        raise FormatError(f"{path}: split.count must be a number from 1 to {MAX_SPLITS}, got {show(count)}")
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise FormatError(f"{path}: part of a model in {count} files, which must be named "
                          f"NAME-00001-of-{count:05}.gguf and so on")
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise FormatError(f"{path}: {len(missing)} of {count} files are missing, the first is {missing[0]}")
    return paths


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of one file. Raises: FormatError."""
    reader, tensor_count, pair_count = _open(path)
    metadata = _metadata(reader, pair_count)
    return _tensors(reader, tensor_count, _alignment(reader.file, metadata)), metadata


def read_pairs(path: Path) -> dict[str, bytes]:
    """Metadata pairs of a file of version 2 or 3 as raw bytes: key, type and value. Raises: FormatError."""
    reader, _, count = _open(path)
    if reader.length.size == 4:
        raise reader.file.fail("GGUF version 1, whose metadata has other sizes than that of later ones")
    reader.spend(count, reader.length.size + 5, "metadata count")
    found = {}
    for i in range(count):
        start = reader.position
        key = reader.string(f"key of metadata pair {i}")
        reader.value(reader.number("<u4", key), f"metadata {show(key)}")
        found[key] = reader.file.bytes(start, reader.position - start)
    return found


def _open(path: Path) -> tuple[_Reader, int, int]:
    """A reader positioned at the metadata, the number of tensors, and the number of metadata pairs."""
    file = MappedFile(path)
    reader = _Reader(file)
    if file.bytes(reader.take(4, "magic"), 4) != b"GGUF":
        raise file.fail(f"not a GGUF file: it begins with {file.bytes(0, 4)!r}")
    version = reader.number("<u4", "version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise file.fail("a big-endian GGUF file; only little-endian ones are read")
        raise file.fail(f"GGUF version {version}; versions 1 to 3 are read")
    if version == 1:
        reader.length = struct.Struct("<I")
    return reader, reader.size("tensor count"), reader.size("metadata count")


def _metadata(reader: _Reader, count: int) -> dict[str, Any]:
    reader.spend(count, reader.length.size + 5, "metadata count")
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = reader.string(f"key of metadata pair {i}")
        what = f"metadata {show(key)}"
        if key in metadata:
            raise reader.file.fail(f"{what}: the key comes twice")
        metadata[key] = reader.value(reader.number("<u4", what), what)
    return metadata


def _alignment(file: MappedFile, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise file.fail(f"general.alignment must be a power of two, got {show(alignment)}")
    return alignment


def _tensors(reader: _Reader, count: int, alignment: int) -> dict[str, Tensor]:
    reader.spend(count, reader.length.size + 16, "tensor count")
    entries = [_tensor_entry(reader, i) for i in range(count)]
    file, start = reader.file, -(-reader.position // alignment) * alignment
    entries = _with_blocks_of_128(entries, file.size - start)
    tensors: dict[str, Tensor] = {}
    spans = []
    for name, shape, kind, offset in entries:
        file.check_name(name, tensors)
        if offset % alignment:
            raise file.fail(f"tensor {show(name)}: offset {offset} is no multiple of the alignment {alignment}")
        tensors[name] = tensor = file.tensor(name, shape, kind, start + offset)
        spans.append((offset, offset + tensor.nbytes, name))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise file.fail(f"tensors {show(name)} and {show(other)} overlap at offset {begin}")
    return tensors


def _with_blocks_of_128(entries: list[tuple], size: int) -> list[tuple]:
    """The entries, with Q2_0 replaced by Q2_0_128 in files from before Q2_0 had blocks of 64. size: bytes of all data.

    Both types have the same number. Old files are recognised by tensor sizes: with blocks of 64, tensors would overlap.
    """
    small, large = TYPES["Q2_0"], TYPES["Q2_0_128"]
    begins = sorted({offset for *_, offset in entries} | {size})
    for _, shape, kind, offset in entries:
        if kind is small and shape and shape[-1] % large.block == 0 and offset < size:
            rows, room = math.prod(shape[:-1]), begins[bisect.bisect_right(begins, offset)] - offset
            if rows * large.row_bytes(shape[-1]) <= room < rows * small.row_bytes(shape[-1]):
                return [(*entry[:2], large if entry[2] is small else entry[2], entry[3]) for entry in entries]
    return entries


def _tensor_entry(reader: _Reader, index: int):
    name = reader.string(f"name of tensor {index}")
    what = f"tensor {show(name)}"
    dims = reader.number("<u4", what)
    if dims > MAX_DIMS:
        raise reader.file.fail(f"{what}: {dims} dimensions, at most {MAX_DIMS} are possible")
    shape = tuple(reader.size(what) for _ in range(dims))[::-1]
    if 0 in shape:
        raise reader.file.fail(f"{what}: shape {list(shape)} has a dimension of 0")
    number = reader.number("<u4", what)
    if number in GGML_REMOVED:
        raise reader.file.fail(f"{what}: type {GGML_REMOVED[number]} no longer exists; convert the model again")
    if number not in GGML_NAMES:
        raise reader.file.fail(f"{what}: unknown tensor type number {number}")
    return name, shape, TYPES[GGML_NAMES[number]], reader.number("<u8", what)
