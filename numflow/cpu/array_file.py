"""Bytes by name in a safetensors file with a checksum of each, read straight into memory for weights."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from numflow.cpu.arena import Arena
from numflow.errors import NumflowError
from numflow.formats import safetensors
from numflow.formats.writer import Entry
from numflow.formats.writer import write as write_safetensors

_PIECE = 1 << 20  # bytes that are read and summed at a time, while the cache holds them
_LARGE = 1 << 23  # bytes from which on several threads read
_SUMS = "sums"
_ARENA = Arena()


class ArrayFile:
    """What is in such a file: nothing where there is none, or none that can be read."""

    def __init__(self, path: Path):
        self.path, self._places, self._sums = path, dict[str, tuple[int, int]](), dict[str, int]()
        try:
            stored, metadata = safetensors.read_with_metadata(path)
            at = path.stat().st_size - sum(tensor.nbytes for tensor in stored.values())
            self._sums = dict(json.loads(metadata[_SUMS]))
            os.utime(path)  # it is in use
        except (OSError, NumflowError, LookupError, TypeError, ValueError):
            return
        for name, tensor in stored.items():
            self._places[name] = at, tensor.nbytes
            at += tensor.nbytes

    def read(self, name: str, nbytes: int, n_threads: int) -> np.ndarray | None:
        """uint8 [nbytes]; None if it is not there, or not as it was written."""
        begin, found = self._places.get(name, (0, -1))
        if found != nbytes:
            return None
        array, threads = _ARENA.zeros(nbytes), 1 if nbytes < _LARGE else n_threads
        pieces = _pieces(array)
        sums = [0] * len(pieces)

        def read_some(thread: int) -> None:
            with open(self.path, "rb", buffering=0) as file:
                for at in range(thread, len(pieces), threads):
                    file.seek(begin + at * _PIECE)
                    if file.readinto(pieces[at].data) == pieces[at].nbytes:
                        sums[at] = _sum(pieces[at])

        try:
            if threads == 1:
                read_some(0)
            else:
                from concurrent.futures import ThreadPoolExecutor

                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read_some, range(threads)))
        except OSError:
            return None
        return array if _checksum(sums) == self._sums.get(name) else None


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write uint8 arrays; the file appears when it is complete.

    Raises:
        RequestError: it cannot be written.
    """
    sums = {name: _checksum(map(_sum, _pieces(array))) for name, array in arrays.items()}
    write_safetensors(path, [Entry.of(name, array) for name, array in arrays.items()], {_SUMS: json.dumps(sums)},
                      lasting=False)


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    return [array[at:at + _PIECE] for at in range(0, array.nbytes, _PIECE)]


def _sum(piece: np.ndarray) -> int:
    """Of its 64-bit words: at the speed of memory, and enough against what disks and broken writes do."""
    whole = piece.nbytes // 8 * 8
    return int(piece[:whole].view(np.uint64).sum()) ^ zlib.crc32(piece[whole:].data)


def _checksum(sums: Iterable[int]) -> int:
    """Of an array, by those of its pieces."""
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in sums))
