"""Quantised keys and values: the stored form of a row of the KV cache, in NumPy.

A row of E columns (a token's key or value of one head) is padded with zeros to blocks of 32. A block x is rotated by an
orthonormal Hadamard matrix, which spreads outlier columns over all 32. The rotated block is quantised to levels between
its minimum and maximum, or a little inside if that lowers the sum of squared errors. The header is two bfloat16,
rounded so that the levels still cover the range:

    t = H x,  minimum <= low,  scale >= (high - minimum) / (levels - 1)        code = round((t - minimum) / scale)
    x' = H (minimum + scale * code)

The header costs one bit per column. "q3h" has 11 levels, with two columns in 7 bits. A stored row depends on that row
alone. Every operation here is rounded to float32 in this order, so that kernels produce the same bits.
"""

from dataclasses import dataclass

import numpy as np

from numflow.quant.bits import Plane, to_bfloat16

BLOCK = 32
HEADER_BYTES = 4           # scale, then minimum
PAIR_LEVELS = 11           # a pair, column j of a block's first and second half: first + 11 * second
SMALLEST = 1e-36           # smallest scale; below, all values of a block become its minimum
NORM = 32 ** -0.5


@dataclass(frozen=True)
class KVType:
    """A type of cached keys or values.

    planes: bit planes of a block's 32 codes, or 16 pairs (bits.py, split).
    insets: candidate margins between a block's range and its levels, as fractions of the range, tried in this order.
    """

    name: str
    levels: int
    planes: tuple[Plane, ...]
    insets: tuple[float, ...] = (0.0,)

    @property
    def codes(self) -> int:
        """Number of codes in a block."""
        return BLOCK // 2 if self.levels == PAIR_LEVELS else BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, header included."""
        return HEADER_BYTES + sum(plane.bytes(self.codes) for plane in self.planes)

    @property
    def bits_per_value(self) -> float:
        """Bits per column, header included."""
        return 8 * self.block_bytes / BLOCK

    def encode(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float32 [..., E] -> codes u8 [..., blocks, 32], scales and minima f32 [..., blocks]."""
        t = rotated(_blocks(x))
        tried = [self._quantised(t, np.float32(inset)) for inset in self.insets]
        best = np.argmin(np.stack([error for *_, error in tried]), axis=0)[None]
        codes, scales, minima = (np.stack([result[i] for result in tried]) for i in range(3))
        return (np.take_along_axis(codes, best[..., None], 0)[0], np.take_along_axis(scales, best, 0)[0],
                np.take_along_axis(minima, best, 0)[0])

    def _quantised(self, t: np.ndarray, inset: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales, minima and sums of squared errors of rotated blocks float32 [..., 32]."""
        low, high = t.min(axis=-1), t.max(axis=-1)
        margin = (high - low) * inset
        minimum = _down(low + margin)
        scale = _up(((high - margin) - minimum) * np.float32(1 / (self.levels - 1)))
        with np.errstate(divide="ignore"):
            inverse = np.where(scale > np.float32(SMALLEST), np.float32(1) / scale, np.float32(0))
        codes = np.clip(np.rint((t - minimum[..., None]) * inverse[..., None]), 0, self.levels - 1)
        error = t - (codes.astype(np.float32) * scale[..., None] + minimum[..., None])
        squares = error * error
        for half in (16, 8, 4, 2, 1):
            squares = squares[..., :half] + squares[..., half:]
        return codes.astype(np.uint8), scale, minimum, squares[..., 0]

    def decode(self, codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, columns: int) -> np.ndarray:
        """De-quantised rows, float32 [..., columns]."""
        t = codes.astype(np.float32) * scales[..., None] + minima[..., None]
        return rotated(t).reshape(*t.shape[:-2], -1)[..., :columns]


_PLANES = {bits: tuple(Plane(width, shift, split=True) for width, shift in planes) for bits, planes in {
    2: ((2, 0),), 3: ((1, 2), (2, 0)), 4: ((4, 0),), 5: ((1, 4), (4, 0)), 6: ((2, 4), (4, 0)),
    7: ((1, 6), (2, 4), (4, 0)), 8: ((8, 0),)}.items()}
CODED = {kind.name: kind for kind in (
    KVType("q8", 256, _PLANES[8]), KVType("q6", 64, _PLANES[6]), KVType("q5", 32, _PLANES[5]),
    KVType("q4", 16, _PLANES[4], (0.0, 0.025, 0.05)), KVType("q3h", PAIR_LEVELS, _PLANES[7], (0.0, 0.025, 0.05)),
    KVType("q3", 8, _PLANES[3], (0.0, 0.04, 0.08)), KVType("q2", 4, _PLANES[2], (0.0, 0.075, 0.15)))}
PLAIN = {"f32": 4, "f16": 2, "bf16": 2}  # float types and their bytes
KV_TYPES = (*PLAIN, *CODED)


def value_bytes(kind: str) -> float:
    """Bytes per column, with the column's share of the header."""
    return PLAIN[kind] if kind in PLAIN else CODED[kind].bits_per_value / 8


def stored(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 [..., E] after storage in a cache of a type of KV_TYPES."""
    if kind == "f32":
        return x
    if kind == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        return to_bfloat16(x)
    return CODED[kind].decode(*CODED[kind].encode(x), x.shape[-1])


def rotated(x: np.ndarray) -> np.ndarray:
    """Orthonormal Hadamard transform of the last axis, float32 [..., 32]; it is its own inverse."""
    for step in (16, 8, 4, 2, 1):
        low, high = np.moveaxis(x.reshape(*x.shape[:-1], -1, 2, step), -2, 0)
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
    return x * np.float32(NORM)


def _blocks(x: np.ndarray) -> np.ndarray:
    """float32 [..., blocks, 32], padded with zeros."""
    short = -x.shape[-1] % BLOCK
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]).astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)


def _up(x: np.ndarray) -> np.ndarray:
    """Round away from zero to bfloat16, as float32."""
    return ((np.ascontiguousarray(x).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def _down(x: np.ndarray) -> np.ndarray:
    """Round down to bfloat16, as float32."""
    cut = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(x < 0, _up(x), cut)
