"""Memory-mapped files, and tensors as checked ranges of them."""

import ctypes
import json
import math
import mmap
import stat
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError, OutOfMemoryError, no_memory
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import TensorType

MAX_DIMS = 32  # NumPy's own limit is 64
MAX_JSON_BYTES = 100_000_000
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def show(value: object) -> str:
    """A value from a file, quoted and shortened for a message. Nested values are not traversed."""
    if isinstance(value, list | tuple):
        if len(value) > MAX_DIMS or not all(isinstance(item, int | str) for item in value):
            return f"a {type(value).__name__} of {len(value)}"
    elif not isinstance(value, int | float | str | bytes | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]}...{text[-20:]}"


def release_pages(array: np.ndarray) -> None:
    """Release the memory pages of an array that is a view of a mapped file; other arrays are left alone.

    During loading, this keeps file data and converted data from being in memory at the same time.
    """
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not array.flags.c_contiguous or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)


def release_memory() -> None:
    """Release memory after loading: pages of all mapped files, and free pages of the C heap.

    The system maps neighbours of a page that is read, also those released by release_pages before.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        for mapped in list(_maps):
            mapped.madvise(mmap.MADV_DONTNEED)
    if sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim"):  # not in every C library
        ctypes.CDLL(None).malloc_trim(0)


class MappedFile:
    """A regular file, mapped read-only. `data` is uint8 [size]; pages are read on first access."""

    def __init__(self, path: Path):
        """Raises: FormatError: not a regular file, empty, or not readable."""
        self.path = Path(path)
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise FormatError(f"{path}: not a regular file")
            if self.path.stat().st_size == 0:
                raise FormatError(f"{path}: the file is empty")
            with open(self.path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            if no_memory(error):
                raise OutOfMemoryError(f"{path}: this process may not take as much memory as the file has") from None
            raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        _maps.add(self.map)
        self.data = np.frombuffer(self.map, np.uint8)
        self.size = len(self.data)

    def bytes(self, start: int, count: int) -> bytes:
        """A copy of `count` bytes from `start`, fewer at the end of the file."""
        return self.map[start:start + count]

    def fail(self, message: str) -> FormatError:
        """A FormatError about this file, for the caller to raise."""
        return FormatError(f"{self.path}: {message}")

    def check_name(self, name: str, known) -> None:
        """Check that a tensor name is valid Unicode and not repeated."""
        if name in known:
            raise self.fail(f"tensor {show(name)}: there are two of that name")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self.fail(f"tensor {show(name)}: the name is not valid Unicode") from None

    def count(self, name: str, shape: tuple[int, ...]) -> int:
        """Number of elements; impossible sizes are errors."""
        if len(shape) > MAX_DIMS:
            raise self.fail(f"tensor {show(name)}: {len(shape)} dimensions, at most {MAX_DIMS} are possible")
        if math.prod(max(d, 1) for d in shape) >= 2**60:
            raise self.fail(f"tensor {show(name)}: shape {show(shape)} is larger than any file")
        return math.prod(shape)

    def tensor(self, name: str, shape: tuple[int, ...], kind: TensorType, start: int) -> Tensor:
        """The tensor whose data begins at offset `start` of the file.

        Raises:
            FormatError: an impossible shape, rows of partial blocks, or data beyond the end of the file.
        """
        columns = shape[-1] if shape else 1
        if columns % kind.block:
            raise self.fail(f"tensor {show(name)}: rows of {columns} are no whole number of {kind.name} blocks "
                            f"of {kind.block}")
        self.count(name, shape)
        rows, data = math.prod(shape[:-1]), self.data
        nbytes = rows * kind.row_bytes(columns)
        if start < 0 or start + nbytes > self.size:
            raise self.fail(f"tensor {show(name)}: needs bytes {start} to {start + nbytes}, "
                            f"the file has {self.size} (is it truncated?)")
        return Tensor(name, shape, kind, lambda: data[start:start + nbytes].reshape(rows, kind.row_bytes(columns)))


def parse_json(text: bytes, where: str, unique_keys: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        FormatError: not UTF-8, not JSON, not an object, or (unique_keys) a repeated key.
    """
    def unique(pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {show(twice)} comes twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique if unique_keys else None)
    except RecursionError:
        raise FormatError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises: FormatError."""
    file = MappedFile(path)
    if file.size > MAX_JSON_BYTES:
        raise file.fail(f"{file.size} bytes of JSON, at most {MAX_JSON_BYTES} are read")
    return parse_json(file.bytes(0, file.size), str(path))
