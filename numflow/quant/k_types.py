"""GGML's K types (Q2_K to Q6_K): super-blocks of 256 weights with quantised scales of sub-blocks.

    raw = encode(x, "Q4_K")        # float32 [N, K] -> uint8 [N, K / 256 * 144]

k_kernels.py searches the codes; this module packs them in GGML's layout. An imatrix weights the squared errors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numflow.errors import RequestError
from numflow.quant.scheme import read_only
from numflow.quant.search import checked_importance

BLOCK = 256
_LARGEST_SCALE = float(np.finfo(np.float16).max) / 2  # the fitted scale may be somewhat larger
_FITS = 2  # iterations of fitting d and dmin to the codes
_LEAST = 1e-4  # lower limit of importances relative to their mean: inputs unused in calibration may be used later


@dataclass(frozen=True)
class KType:
    """size: weights of a sub-block. low, high: limits of codes. levels: of scales and, with unsigned codes, minima."""

    size: int
    low: int
    high: int
    levels: int


K_TYPES = {"Q2_K": KType(16, 0, 3, 15), "Q3_K": KType(16, -4, 3, 32), "Q4_K": KType(32, 0, 15, 63),
           "Q5_K": KType(32, 0, 31, 63), "Q6_K": KType(16, -32, 31, 128)}


def encode(x: np.ndarray, name: str, matrix: str = "matrix", threads: int | None = None,
           importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [N, K], K a multiple of 256 -> uint8 [N, row bytes].

    importance: float32 [K] or [N, K], weights of squared errors.

    Raises:
        RequestError: a weight is too large for a float16 scale, or importances do not fit.
    """
    kind = K_TYPES[name]
    x = read_only(np.ascontiguousarray(x, np.float32))
    w = error_weights(importance, x, matrix)
    largest = np.abs(x).max(initial=0)
    if largest > _LARGEST_SCALE * (kind.levels - 1) * max(kind.high, -kind.low):
        raise RequestError(f"{matrix} has weights up to {largest:g}, which {name} cannot hold")
    found = (_signed if kind.low else _with_minima)(x, w, kind, threads)
    parts = _PACKERS[name](*found)
    count = x.shape[1] // BLOCK
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(len(x), count, -1) for part in parts],
                          axis=2).reshape(len(x), -1)


def error_weights(importance: np.ndarray | None, x: np.ndarray, matrix: str) -> np.ndarray:
    """Weights of squared errors, float32 [1 or N, K], with mean about 1 per row; ones without importances.

    Raises:
        RequestError: another shape, or values that are negative, infinite or NaN.
    """
    w = checked_importance(importance, x, matrix)
    if importance is None:
        return w
    means = w.mean(axis=1, dtype=np.float64, keepdims=True)
    scaled = np.divide(w, means, out=np.ones(w.shape), where=means > 0)
    return read_only(np.maximum(scaled, _LEAST).astype(np.float32))


def _with_minima(x: np.ndarray, w: np.ndarray, kind: KType, threads: int | None) -> tuple[np.ndarray, ...]:
    """d, dmin f16 [N, K / 256], scales and minima u8 [N, K / size], codes u8 [N, K]."""
    from numflow.quant import k_kernels
    from numflow.quant.threads import over_rows

    rows, columns = x.shape
    blocks, top = (rows, columns // kind.size), np.float32(kind.high)
    scales, minima = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    over_rows(k_kernels.scales_and_minima, rows, threads, x, w, kind.size, top, scales, minima)
    stored, least, codes = np.empty(blocks, np.uint8), np.empty(blocks, np.uint8), np.empty(x.shape, np.uint8)
    sums = np.empty((rows, columns // BLOCK, 6), np.float32)

    def run(d: np.ndarray, dmin: np.ndarray) -> np.ndarray:
        over_rows(k_kernels.codes_with_minima, rows, threads, x, w, kind.size, top, np.float32(kind.levels), d, dmin,
                  scales, minima, stored, least, codes, sums)
        return sums[..., 0].copy()

    levels = np.float32(kind.levels)
    d, dmin = (half(part.reshape(rows, columns // BLOCK, -1).max(axis=2) / levels) for part in (scales, minima))
    error = run(d, dmin)
    for _ in range(_FITS):
        _, qq, qm, mm, qx, mx = np.moveaxis(sums.astype(np.float64), 2, 0)
        determinant = qq * mm - qm * qm
        with np.errstate(divide="ignore", invalid="ignore"):
            regular = determinant > 1e-12 * qq * mm
            new_d = np.where(regular, (qx * mm - mx * qm) / determinant, np.where(qq > 0, qx / qq, 0))
            new_dmin = np.where(regular, (qx * qm - mx * qq) / determinant, np.where(qq > 0, 0, -mx / mm))
        new_d, new_dmin = (half(np.maximum(np.nan_to_num(part), 0)) for part in (new_d, new_dmin))
        new_error = run(new_d, new_dmin)
        better = new_error < error
        d, dmin = np.where(better, new_d, d), np.where(better, new_dmin, dmin)
        error = np.minimum(error, new_error)
    run(d, dmin)
    return d.astype(np.float16), dmin.astype(np.float16), stored, least, codes


def _signed(x: np.ndarray, w: np.ndarray, kind: KType, threads: int | None) -> tuple[np.ndarray, ...]:
    """d f16 [N, K / 256], scales i8 [N, K / size], codes i8 [N, K]."""
    from numflow.quant import k_kernels
    from numflow.quant.threads import over_rows

    rows, columns = x.shape
    low, high, levels = (np.float32(value) for value in (kind.low, kind.high, kind.levels))
    scales = np.empty((rows, columns // kind.size), np.float32)
    over_rows(k_kernels.signed_scales, rows, threads, x, w, kind.size, low, high, scales)
    stored, codes = np.empty(scales.shape, np.int8), np.empty(x.shape, np.int8)
    sums = np.empty((rows, columns // BLOCK, 3), np.float32)

    def run(d: np.ndarray) -> np.ndarray:
        over_rows(k_kernels.signed_codes, rows, threads, x, w, kind.size, low, high, levels, d, scales, stored, codes,
                  sums)
        return sums[..., 0].copy()

    d = fitted(scales.reshape(rows, columns // BLOCK, -1), levels, run, sums)
    return d.astype(np.float16), stored, codes


def fitted(scales: np.ndarray, levels: np.floating, run: Callable[[np.ndarray], np.ndarray], sums: np.ndarray
           ) -> np.ndarray:
    """Block scales f32 [N, B] for sub-block scales [N, B, n], by least squares.

    run: computes codes for given block scales, returns errors, and fills `sums` [N, B, 3] for the next fit. Its last
    call has the returned scales.
    """
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=2)[..., None], axis=2)[..., 0]
    d = half(-largest / levels)  # the largest scale becomes -levels, the code with the largest magnitude
    error = run(d)
    for _ in range(_FITS):
        _, qq, qx = np.moveaxis(sums.astype(np.float64), 2, 0)
        new_d = half(np.divide(qx, qq, out=np.zeros_like(qx), where=qq > 0))
        new_error = run(new_d)
        d = np.where(new_error < error, new_d, d)
        error = np.minimum(error, new_error)
    run(d)
    return d


def half(x: np.ndarray) -> np.ndarray:
    """float32 rounded to float16 precision."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _planes(codes: np.ndarray, groups: int, width: int, bits: int) -> np.ndarray:
    """u8 [blocks, 256] -> `groups` groups of `width` bytes; a byte packs codes of 8 / bits consecutive runs."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = codes.reshape(-1, groups, len(shifts), width) << shifts
    return np.bitwise_or.reduce(runs, axis=2).reshape(len(codes), -1)


def _blocks(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(-1, BLOCK)


def _six_bits(stored: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Pack eight 6-bit scales and eight 6-bit minima into 12 bytes."""
    s, m = stored.reshape(-1, 2, 4), least.reshape(-1, 2, 4)
    return np.concatenate([s[:, 0] | (s[:, 1] >> 4) << 6, m[:, 0] | (m[:, 1] >> 4) << 6,
                           (s[:, 1] & 15) | (m[:, 1] & 15) << 4], axis=1)


def _q2(d, dmin, stored, least, codes):
    return (stored | least << 4).reshape(-1, 16), _planes(_blocks(codes), 2, 32, 2), d, dmin


def _q3(d, stored, codes):
    scales, values = (stored + 32).astype(np.uint8).reshape(-1, 16), (_blocks(codes) + 4).astype(np.uint8)
    high = np.bitwise_or.reduce((scales >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=1)
    low = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    return _planes(values >> 2, 1, 32, 1), _planes(values & 3, 2, 32, 2), np.concatenate([low, high], axis=1), d


def _q4(d, dmin, stored, least, codes):
    return d, dmin, _six_bits(stored, least), _planes(_blocks(codes), 4, 32, 4)


def _q5(d, dmin, stored, least, codes):
    codes = _blocks(codes)
    return d, dmin, _six_bits(stored, least), _planes(codes >> 4, 1, 32, 1), _planes(codes & 15, 4, 32, 4)


def _q6(d, stored, codes):
    values = (_blocks(codes) + 32).astype(np.uint8)
    return _planes(values & 15, 2, 64, 4), _planes(values >> 4, 2, 32, 2), stored, d


_PACKERS = {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q4, "Q5_K": _q5, "Q6_K": _q6}
