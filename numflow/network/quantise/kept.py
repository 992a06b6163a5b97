"""Disk cache of quantised tensors: with `weights="q3h"`, the next start of the same model reads the results.

Each tensor has a file (formats/kept.py: names and removal). Its name is a hash of the model's files, the calibration,
the tensor, the scheme and the source code of quantisation. So recipes share common tensors, and changes cause
re-quantisation.
"""

import contextlib
import functools
import os
import threading
from pathlib import Path

import numpy as np

from numflow import kernel_cache, trust
from numflow.errors import FormatError, NumflowError
from numflow.formats import kept, safetensors
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.writer import TensorEntry, write

SMALLEST = 1 << 20  # total bytes; smaller models are quantised quickly and not cached
_ROWS, _SUM = "rows", "sum"


class KeptTensors:
    """Cache of quantised tensors of one model and one calibration.

    nbytes: total bytes that may be written.
    """

    def __init__(self, model: Path, state: str, calibration: str, nbytes: int):
        self._model, self._state, self._calibration, self._nbytes = model, state, calibration, nbytes
        self._room: bool | None = None  # unknown before the first write
        self._lock = threading.Lock()

    @classmethod
    def open(cls, checkpoint: Checkpoint, imatrix: Path | None, nbytes: int,
             method: str = "") -> "KeptTensors | None":
        """The cache of a model that is quantised to `nbytes` bytes; None if caching is off or impossible.

        imatrix: the calibration file. method: description of a calibration without file, "" for none.
        """
        if not kept.is_on() or nbytes < SMALLEST:
            return None
        try:
            state = kept.state_of(checkpoint.files.get("weights", [checkpoint.path]))
            calibration = method if imatrix is None else kept.state_of([imatrix])
        except OSError:  # the model is not in files
            return None
        if not trust.usable(folder(), "quantised weights"):
            return None
        kept.prune(folder())
        return cls(checkpoint.path, state, calibration, nbytes)

    def take(self, tensor: Tensor, scheme: str) -> np.ndarray | None:
        """A cached tensor, uint8 [rows, row_bytes]; None if missing or damaged."""
        path = self._path(tensor, scheme)
        if not trust.readable(path):
            return None
        try:
            stored, metadata = safetensors.read_with_metadata(path)
            rows = stored[_ROWS].raw()
            whole = metadata[_SUM] == str(_checksum(rows))
            os.utime(path)  # mark as recently used
        except (OSError, FormatError, LookupError):
            return None
        return rows if whole else None

    def keep(self, tensor: Tensor, scheme: str, rows: np.ndarray) -> None:
        """Write a quantised tensor, if there is disk space."""
        path = self._path(tensor, scheme)
        with contextlib.suppress(OSError, NumflowError), self._lock:  # caching is optional
            if self._room is None:
                self._room = kept.make_room(path, self._nbytes)
            if self._room:
                write(path, [TensorEntry.of(_ROWS, rows)], {_SUM: str(_checksum(rows))}, kept=True)

    def _path(self, tensor: Tensor, scheme: str) -> Path:
        rest = (_quantiser(), self._calibration, tensor.name, scheme, repr((tensor.shape, tensor.turned)))
        return folder() / kept.file_name(self._model, self._state, rest)


def folder() -> Path:
    """Folder of the cache."""
    return kernel_cache.root("quantised")


@functools.cache
def _quantiser() -> str:
    """Fingerprint of the quantisation code."""
    return kernel_cache.fingerprint("numflow.network.quantise.quantise")


def _checksum(rows: np.ndarray) -> int:
    return kept.checksum(map(kept.piece_sum, kept.pieces(np.ascontiguousarray(rows).reshape(-1))))
