"""Calibration: statistics of the inputs of a model's matrices, collected over a text.

A calibration file is a safetensors file:
    NAME.importance   F32 [K], or [X, K] with a row per expert: mean square of each input column of tensor NAME
    NAME.moment       F32 [K, K]: mean of the inputs' outer products (optional; stored once for matrices with the same
                      input, which are listed in the metadata "moments")
and its metadata has model, text and number of tokens. GGML's imatrix files are calibrations too
(imatrix_files.py).
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError

KIND = "numflow calibration"


@dataclass(frozen=True)
class Calibration:
    """Statistics of inputs by tensor name.

    importances: float32 [K] or [X, K]. moments: float32 [K, K], by the tensor name of their storage.
    shared:      tensor -> tensor name under which its moment is stored.
    facts:       origin: model, text, tokens.
    """

    importances: Mapping[str, np.ndarray] = field(repr=False)
    moments: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    shared: Mapping[str, str] = field(default_factory=dict, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def importance(self, tensor: str) -> np.ndarray | None:
        """Mean square of each input column, None if unknown."""
        return self.importances.get(tensor)

    def moment(self, tensor: str) -> np.ndarray | None:
        """Second moment of the inputs, None if it was not stored."""
        return self.moments.get(self.shared.get(tensor, tensor))

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            RequestError: the file cannot be written.
        """
        from numflow.formats.writer import TensorEntry, write

        entries = [TensorEntry.of(f"{name}.{kind}", value) for kind, table in
                   (("importance", self.importances), ("moment", self.moments)) for name, value in table.items()]
        write(path, entries, {"kind": KIND, "facts": json.dumps(dict(self.facts)), "moments": json.dumps(
            dict(self.shared))})


class LaterCalibration:
    """A calibration that is computed on first use, by the first thread that needs it.

    make: computes the calibration.
    """

    def __init__(self, make: Callable[[], Calibration]):
        self._make, self._lock = make, threading.Lock()
        self._made: Calibration | None = None

    def made(self) -> Calibration:
        """The calibration, computed if necessary."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def importance(self, tensor: str) -> np.ndarray | None:
        """As Calibration.importance."""
        return self.made().importance(tensor)

    def moment(self, tensor: str) -> np.ndarray | None:
        """As Calibration.moment."""
        return self.made().moment(tensor)


def is_calibration(path: Path) -> bool:
    """Whether a file can be a calibration (safetensors, GGUF, or an old imatrix), rather than a text.

    Raises:
        FormatError: the file cannot be read.
    """
    from numflow.network.quantise.imatrix_files import is_imatrix

    return _is_safetensors(path) or is_imatrix(path)


def _is_safetensors(path: Path) -> bool:
    from numflow.formats.mapped import MappedFile

    return MappedFile(path).bytes(5, 4) == b"\0\0\0{"


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file, or a GGML imatrix, which has GGUF tensor names.

    Raises:
        FormatError: the file is no calibration, or damaged.
    """
    from numflow.formats import safetensors
    from numflow.formats.mapped import parse_json
    from numflow.network.quantise.imatrix_files import is_imatrix, read_imatrix

    if not _is_safetensors(Path(path)):
        if is_imatrix(Path(path)):
            return read_imatrix(Path(path))
        raise FormatError(f"{path}: not a calibration: `numflow imatrix` makes one from a text")
    tensors, metadata = safetensors.read_with_metadata(Path(path))
    if metadata.get("kind") != KIND:
        raise FormatError(f"{path}: a safetensors file, but not a calibration: `numflow imatrix` makes one")
    tables: dict[str, dict[str, np.ndarray]] = {"importance": {}, "moment": {}}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind not in tables or tensor.type.name != "F32" or len(tensor.shape) not in (1, 2):
            raise FormatError(f"{path}: {name}: expected NAME.importance or NAME.moment, F32 [K] or [X, K]")
        tables[kind][base] = tensor.f32()
    for base, values in tables["importance"].items():
        if values.size and not (values.min() >= 0 and np.isfinite(values.max())):
            raise FormatError(f"{path}: {base}.importance should be finite and not negative, is {values.min():g} to "
                              f"{values.max():g}")
    shared, facts = (parse_json(metadata.get(key, "{}").encode(), f"{path}: {key}") for key in ("moments", "facts"))
    sample = facts.get("sample", [])
    if not (isinstance(sample, list) and all(isinstance(ids, list) and all(type(i) is int for i in ids)
                                             for ids in sample)):
        raise FormatError(f"{path}: facts: sample should be lists of token ids")
    return Calibration(tables["importance"], tables["moment"], shared, facts)
