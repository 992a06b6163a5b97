"""Arrays by name in a safetensors file, with a checksum each, read directly into memory for weights."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from numflow import trust
from numflow.cpu.memory.arena import Arena
from numflow.errors import NumflowError
from numflow.formats import safetensors
from numflow.formats.kept import PIECE, checksum, piece_sum, pieces
from numflow.formats.writer import TensorEntry
from numflow.formats.writer import write as write_safetensors

_LARGE = 1 << 23  # least bytes that several threads read
_SUMS = "sums"
_ARENA = Arena()


class ArrayFile:
    """Arrays of a file; none if the file is missing or not readable."""

    def __init__(self, path: Path):
        self.path, self._ranges, self._sums = path, dict[str, tuple[int, int]](), dict[str, int]()
        if not trust.readable(path):
            return
        try:
            stored, metadata = safetensors.read_with_metadata(path)
            offset = path.stat().st_size - sum(tensor.nbytes for tensor in stored.values())
            self._sums = dict(json.loads(metadata[_SUMS]))
            os.utime(path)  # mark as recently used
        except (OSError, NumflowError, LookupError, TypeError, ValueError):
            return
        for name, tensor in stored.items():
            self._ranges[name] = offset, tensor.nbytes
            offset += tensor.nbytes

    def read(self, name: str, nbytes: int, n_threads: int) -> np.ndarray | None:
        """Array uint8 [nbytes]; None if it is missing, or its size or checksum is wrong."""
        begin, size = self._ranges.get(name, (0, -1))
        if size != nbytes:
            return None
        array, threads = _ARENA.zeros(nbytes), 1 if nbytes < _LARGE else n_threads
        parts = pieces(array)
        sums = [0] * len(parts)

        def read_some(thread: int) -> None:
            with open(self.path, "rb", buffering=0) as file:
                for i in range(thread, len(parts), threads):
                    file.seek(begin + i * PIECE)
                    if file.readinto(parts[i].data) == parts[i].nbytes:
                        sums[i] = piece_sum(parts[i])

        try:
            if threads == 1:
                read_some(0)
            else:
                from concurrent.futures import ThreadPoolExecutor

                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read_some, range(threads)))
        except OSError:
            return None
        return array if checksum(sums) == self._sums.get(name) else None


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write uint8 arrays; the file appears when it is complete.

    Raises:
        RequestError: it cannot be written.
    """
    sums = {name: checksum(map(piece_sum, pieces(array))) for name, array in arrays.items()}
    write_safetensors(path, [TensorEntry.of(name, array) for name, array in arrays.items()], {_SUMS: json.dumps(sums)},
                      kept=True)
