"""GGML's IQ4_NL and IQ4_XS: 4-bit codes into a codebook of 16 levels, denser around zero.

    raw = encode(x, "IQ4_XS")      # float32 [N, K] -> uint8 [N, K / 256 * 136]

IQ4_NL has a float16 scale per 32 weights. IQ4_XS has a float16 scale d per 256 weights and a 6-bit integer per 32
weights that multiplies d. iq4_kernels.py searches scales and codes; this module packs them in GGML's layout.
"""

import functools

import numpy as np

from numflow.errors import RequestError
from numflow.quant.k_types import BLOCK, error_weights, fitted, half
from numflow.quant.scheme import read_only
from numflow.quant.stored import IQ4

IQ4_TYPES = ("IQ4_NL", "IQ4_XS")
_SIZE = 32   # weights per scale
_STEPS = 32  # scales of IQ4_XS are -32 .. 31 times d


@functools.cache
def levels() -> tuple[np.ndarray, np.ndarray]:
    """The nearest level to each of -127 .. 127, float32 [255], and its code, u8 [255]."""
    integers, book = np.arange(-127, 128)[:, None], np.array(IQ4)
    codes = np.abs(integers - book).argmin(axis=1)
    return book[codes].astype(np.float32), codes.astype(np.uint8)


def encode(x: np.ndarray, name: str, matrix: str = "matrix", threads: int | None = None,
           importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [N, K], K a multiple of 32, or of 256 for IQ4_XS -> uint8 [N, row bytes].

    importance: float32 [K] or [N, K], weights of squared errors.

    Raises:
        RequestError: a weight is too large for a float16 scale, or importances do not fit.
    """
    from numflow.quant import iq4_kernels
    from numflow.quant.threads import over_rows

    x = read_only(np.ascontiguousarray(x, np.float32))
    w, (near, codes_of) = error_weights(importance, x, matrix), levels()
    largest = np.abs(x).max(initial=0)
    if largest > float(np.finfo(np.float16).max) / 2 * IQ4[-1] * (1 if name == "IQ4_NL" else _STEPS - 1):
        raise RequestError(f"{matrix} has weights up to {largest:g}, which {name} cannot hold")
    scales = np.empty((len(x), x.shape[1] // _SIZE), np.float32)
    over_rows(iq4_kernels.best_scales, len(x), threads, x, w, near, scales)
    if name == "IQ4_NL":
        parts = [half(scales).astype("<f2")[..., None].view(np.uint8)]
        scales = half(scales)
    else:
        parts, scales = _block_scales(x, w, scales, threads)
    codes = np.empty(x.shape, np.uint8)
    over_rows(iq4_kernels.codes_of_scales, len(x), threads, x, scales, codes_of, codes)
    low, high = np.moveaxis(codes.reshape(*scales.shape, 2, 16), 2, 0)
    nibbles = (low | high << 4).reshape(*parts[0].shape[:2], -1)
    return np.concatenate([*parts, nibbles], axis=2).reshape(len(x), -1)


def _block_scales(x: np.ndarray, w: np.ndarray, scales: np.ndarray, threads: int | None
            ) -> tuple[list[np.ndarray], np.ndarray]:
    """Header fields of blocks of 256, u8 [N, K / 256, ...] each, and the scales that they encode, f32 [N, K / 32]."""
    from numflow.quant import iq4_kernels
    from numflow.quant.threads import over_rows

    grouped = scales.reshape(len(x), -1, BLOCK // _SIZE)
    stored, sums = np.empty(scales.shape, np.int8), np.empty((*grouped.shape[:2], 3), np.float32)

    def run(d: np.ndarray) -> np.ndarray:
        over_rows(iq4_kernels.steps_of_scales, len(x), threads, x, w, levels()[0], np.float32(_STEPS), d, scales,
                  stored, sums)
        return sums[..., 0].copy()

    d = fitted(grouped, np.float32(_STEPS), run, sums)
    steps = (stored + _STEPS).astype(np.uint8).reshape(grouped.shape)
    high = np.bitwise_or.reduce((steps >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=2)
    low = steps[..., 0::2] & 15 | (steps[..., 1::2] & 15) << 4
    parts = [d.astype("<f2")[..., None].view(np.uint8), high.astype("<u2")[..., None].view(np.uint8), low]
    return parts, np.repeat(d, BLOCK // _SIZE, axis=1) * stored.astype(np.float32)
