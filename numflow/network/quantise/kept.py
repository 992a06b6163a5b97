"""Quantised tensors on disk: what `weights="q3h"` has once quantised, the next start of the same model reads.

Each tensor has a file (formats/kept.py says how it is called and how long it stays). Its name stands for the model's
files, the calibration, the tensor, its scheme and the sources of the code that quantises, so that recipes share what
they have in common and what changes is quantised anew.
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

SMALLEST = 1 << 20  # bytes of all tensors together; fewer are quantised in no time
_ROWS, _SUM = "rows", "sum"


class KeptTensors:
    """The quantised tensors of one model and one calibration.

    nbytes: of all that may be written.
    """

    def __init__(self, model: Path, state: str, calibration: str, nbytes: int):
        self._model, self._state, self._calibration, self._nbytes = model, state, calibration, nbytes
        self._room: bool | None = None  # unknown before the first is written
        self._lock = threading.Lock()

    @classmethod
    def open(cls, checkpoint: Checkpoint, imatrix: Path | None, nbytes: int,
             method: str = "") -> "KeptTensors | None":
        """Those of a model that is quantised to `nbytes` bytes; None where nothing is to be kept.

        imatrix: the calibration file. method: of a calibration without a file, "" where there is none.
        """
        if not kept.is_on() or nbytes < SMALLEST:
            return None
        try:
            state = kept.state_of(checkpoint.files.get("weights", [checkpoint.path]))
            calibration = method if imatrix is None else kept.state_of([imatrix])
        except OSError:  # not made of files
            return None
        if not trust.usable(folder(), "quantised weights"):
            return None
        kept.prune(folder())
        return cls(checkpoint.path, state, calibration, nbytes)

    def take(self, tensor: Tensor, scheme: str) -> np.ndarray | None:
        """uint8 [rows, row_bytes] as it was quantised; None where it is not there, or not as it was written."""
        path = self._path(tensor, scheme)
        if not trust.readable(path):
            return None
        try:
            stored, metadata = safetensors.read_with_metadata(path)
            rows = stored[_ROWS].raw()
            whole = metadata[_SUM] == str(_checksum(rows))
            os.utime(path)  # it is in use
        except (OSError, FormatError, LookupError):
            return None
        return rows if whole else None

    def keep(self, tensor: Tensor, scheme: str, rows: np.ndarray) -> None:
        """Write what a tensor was quantised to, if there is room."""
        path = self._path(tensor, scheme)
        with contextlib.suppress(OSError, NumflowError), self._lock:  # it is as well without
            if self._room is None:
                self._room = kept.make_room(path, self._nbytes)
            if self._room:
                write(path, [TensorEntry.of(_ROWS, rows)], {_SUM: str(_checksum(rows))}, kept=True)

    def _path(self, tensor: Tensor, scheme: str) -> Path:
        rest = (_quantiser(), self._calibration, tensor.name, scheme, repr((tensor.shape, tensor.turned)))
        return folder() / kept.file_name(self._model, self._state, rest)


def folder() -> Path:
    """Folder of the kept files."""
    return kernel_cache.root("quantised")


@functools.cache
def _quantiser() -> str:
    """The version of all code that quantises."""
    return kernel_cache.fingerprint("numflow.network.quantise.quantise")


def _checksum(rows: np.ndarray) -> int:
    return kept.checksum(map(kept.piece_sum, kept.pieces(np.ascontiguousarray(rows).reshape(-1))))
