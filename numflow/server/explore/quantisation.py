"""A tensor of a model quantised with a scheme: histograms, errors, and the bits of one block."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from numflow import formats, registry
from numflow.errors import RequestError, did_you_mean
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.quant import SCHEMES, decode, encode, find
from numflow.quant.layout import UNIT, RowScheme, unpack_reference
from numflow.quant.scheme import Scheme

VALUES, BINS, TENSORS = 1 << 18, 61, 4096  # largest number of weights and of listed tensors; bins of a histogram


def schemes() -> list[dict[str, Any]]:
    """Names of the schemes, with their bits per weight in a row of 4096."""
    found = []
    for name, scheme in SCHEMES.items():
        assert isinstance(scheme, Scheme)
        found.append({"name": name, "levels": scheme.levels, "bits": scheme.bits_per_weight(4096)})
    return found


def tensors(path: str) -> list[dict[str, Any]]:
    """Matrices of a model's files whose rows can be quantised."""
    found = [one for one in _checkpoint(path).tensors.values() if len(one.shape) > 1 and one.columns % UNIT == 0]
    return [{"name": one.name, "shape": list(one.shape), "type": one.type.name} for one in found[:TENSORS]]


def explored(path: str, name: str, scheme: str, row: int = 0) -> dict[str, Any]:
    """Quantise rows of a tensor from `row` on, up to VALUES weights, and compare them with the original.

    Returns:
        values and errors (histograms: from, to, counts), rms, rms_error, max_error, bits, and block: the first weights
        of the first row, with scale, zero and codes of numflow's own schemes, and the 7 bits of each pair of q3h.

    Raises:
        RequestError: there is no such tensor, row or scheme, or the scheme's blocks do not divide the columns.
    """
    tensor, chosen = _tensor(path, name), find(scheme)
    if not 0 <= row < tensor.rows:
        raise RequestError(f"row should be 0 .. {tensor.rows - 1} of {name}, is {row}")
    count = max(1, min(tensor.rows - row, VALUES // tensor.columns))
    columns = min(tensor.columns, VALUES // UNIT * UNIT)
    x = np.ascontiguousarray(tensor.f32(np.arange(row, row + count))[:, :columns], np.float32)
    raw = encode(x, chosen, name=name, threads=1)
    y = decode(raw, chosen, columns, threads=1)
    return {"tensor": name, "type": tensor.type.name, "scheme": scheme, "rows": [row, row + count], "columns": columns,
            "bits": 8 * raw.shape[1] / columns, "rms": _rms(x), "rms_error": _rms(y - x),
            "max_error": float(np.abs(y - x).max()), "values": _histogram(x), "errors": _histogram(y - x),
            "block": _block(x, y, raw, chosen)}


@lru_cache(maxsize=4)
def _checkpoint(path: str) -> Checkpoint:
    return formats.open_checkpoint(Path(registry.resolve(path, offline=True, progress=False)))


def _tensor(path: str, name: str) -> Tensor:
    tensors = _checkpoint(path).tensors
    if name not in tensors:
        raise RequestError(f"no tensor {name!r:.200}{did_you_mean(name[:200], tensors)}")
    tensor = tensors[name]
    if len(tensor.shape) < 2 or tensor.columns % UNIT:
        raise RequestError(f"{name} has no rows of whole blocks: shape {tensor.shape}")
    return tensor


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def _histogram(x: np.ndarray) -> dict[str, Any]:
    """Histogram between -q and q, the 0.999 quantile of |x|; values beyond are in the outermost bins."""
    edge = float(np.quantile(np.abs(x), 0.999)) or float(np.abs(x).max()) or 1.0
    counts, _ = np.histogram(np.clip(x, -edge, edge), BINS, (-edge, edge))
    return {"from": -edge, "to": edge, "counts": counts.tolist()}


def _block(x: np.ndarray, y: np.ndarray, raw: np.ndarray, scheme: Any) -> dict[str, Any]:
    """Facts on the first unit of 32 weights."""
    found: dict[str, Any] = {"weights": x[0, :UNIT].tolist(), "decoded": y[0, :UNIT].tolist()}
    if not isinstance(scheme, RowScheme):
        return found
    fields = unpack_reference(raw[:1], scheme, x.shape[1])
    scales, zeros = fields.scales_and_zeros()
    codes = fields.codes[0, :UNIT]
    found |= {"levels": scheme.levels, "block": scheme.block, "scale": float(scales[0, 0]), "zero": float(zeros[0, 0]),
              "codes": codes.tolist()}
    if scheme.paired:  # 11 * second + first is below 128
        pairs = [int(first) + scheme.levels * int(second) for first, second in zip(codes[::2], codes[1::2])]
        found["pairs"] = [{"code": pair, "bits": f"{pair:07b}"} for pair in pairs]
    return found
