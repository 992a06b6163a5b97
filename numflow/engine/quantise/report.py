"""Report of a quantised model file: errors, sizes and hashes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import tensor_type, to_f32

NO_HASH = 64 * "0"  # placeholder of a hash in a report
_PART = 1 << 21     # weights per part when errors are measured


def check_finite(tensor: Tensor) -> None:
    """Refuse a tensor with a NaN or an infinity.

    Raises:
        FormatError: the message names row and column.
    """
    step = max(1, _PART // max(1, tensor.columns))
    for first in range(0, tensor.rows, step):
        good = np.isfinite(tensor.f32(slice(first, first + step)))
        if not good.all():
            row, column = np.argwhere(~good)[0]
            raise FormatError(f"{tensor.name}: row {first + row}, column {column} is no finite number")


def errors(tensor: Tensor, data: np.ndarray, kind: str, importance: np.ndarray | None) -> dict[str, float]:
    """Relative RMS error of a quantised tensor, and the same weighted by importances [K] or [X, K]."""
    sums = np.zeros(4)
    step = max(1, _PART // max(1, tensor.columns))
    for first in range(0, tensor.rows, step):
        rows = slice(first, min(first + step, tensor.rows))
        x = tensor.f32(rows)
        # In float64: squares of the smallest weights are 0 in float32.
        squares = [np.square(part, dtype=np.float64) for part in (to_f32(data[rows], kind) - x, x)]
        c = np.ones(1, np.float32)
        if importance is not None:
            expert = np.arange(rows.start, rows.stop) * len(importance) // tensor.rows
            c = importance[expert] if importance.ndim == 2 else importance
        sums += [part.sum(dtype=np.float64) for part in (*squares, *(c * square for square in squares))]
    pairs = ((sums[0], sums[1]), (sums[2], sums[3]))
    plain, weighted = (float(f"{np.sqrt(error / whole):.6e}") if whole else 0.0 for error, whole in pairs)
    return {"error": plain, "weighted_error": weighted}


def totals_of(tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes of all tensors; weights and bits_per_weight of the quantised matrices, including those quantised before."""
    quantised = [row for row in tensors if row["modules"] and tensor_type(row["type"]).block > 1]
    weights = sum(int(np.prod(row["shape"])) for row in quantised)
    bits = 8 * sum(row["bytes"] for row in quantised) / max(weights, 1)
    return {"bytes": sum(row["bytes"] for row in tensors), "weights": weights, "bits_per_weight": round(bits, 6)}


def source_facts(source: Checkpoint) -> dict[str, Any]:
    """Names, sizes and hashes of the weight files."""
    paths = [Path(path) for path in source.files.get("weights", [])]
    return {"files": [{"name": path.name, "bytes": path.stat().st_size, "sha256": _file_sha(path)} for path in paths]}


def _file_sha(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_bytes(path: Path) -> np.ndarray:
    try:
        return np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def sha(data: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data).hexdigest()


def text_sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def report_sha(report: Mapping[str, Any]) -> str:
    """Hash of a report, with NO_HASH in place of its own hash."""
    return text_sha(json.dumps({**report, "sha256": NO_HASH}))
