"""Keys and values in few bits: how one row of them is stored in the cache of attention, in NumPy.

A row of E columns (a token's key or value of one head) is padded with zeros to blocks of 32. A block x is rotated by
an orthonormal Hadamard matrix, which spreads columns of unusual size over all 32, and cut into levels from its smallest
to its largest number; the header is two bfloat16, rounded so that the levels still cover the block:

    t = H x,  minimum <= min t,  scale >= (max t - minimum) / (levels - 1)     code = round((t - minimum) / scale)
    x' = H (minimum + scale * code)

That is one bit more per column than a code has. "q3h" has 11 levels, two columns in 7 bits. What a row becomes depends
on that row alone. Every line here is one rounding of float32, in this order, so that kernels have the same bits.
"""

from dataclasses import dataclass

import numpy as np

from numflow.quant.bits import Plane

BLOCK = 32
HEADER_BYTES = 4           # scale, then minimum
PAIR_LEVELS = 11           # column j of the first half of a block and column j of the second: first + 11 * second
SMALLEST = 1e-36           # of scales; a block whose numbers differ less is its minimum
NORM = 32 ** -0.5


@dataclass(frozen=True)
class KVType:
    """A type of cached keys or values; `planes` are those of a block's 32 codes, or 16 pairs (bits.py, split)."""

    name: str
    levels: int
    planes: tuple[Plane, ...]

    @property
    def codes(self) -> int:
        """Codes of a block."""
        return BLOCK // 2 if self.levels == PAIR_LEVELS else BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, header included."""
        return HEADER_BYTES + sum(plane.bytes(self.codes) for plane in self.planes)

    @property
    def bits_per_value(self) -> float:
        """Bits of a column, header included."""
        return 8 * self.block_bytes / BLOCK

    def encode(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float32 [..., E] -> codes u8 [..., blocks, 32], scales and minima f32 [..., blocks]."""
        t = rotated(_blocks(x))
        minimum = _down(t.min(axis=-1))
        scale = _up((t.max(axis=-1) - minimum) * np.float32(1 / (self.levels - 1)))
        with np.errstate(divide="ignore"):
            inverse = np.where(scale > np.float32(SMALLEST), np.float32(1) / scale, np.float32(0))
        codes = np.rint((t - minimum[..., None]) * inverse[..., None])
        return np.minimum(codes, self.levels - 1).astype(np.uint8), scale, minimum

    def decode(self, codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, columns: int) -> np.ndarray:
        """What `encode` returned -> float32 [..., columns]."""
        t = codes.astype(np.float32) * scales[..., None] + minima[..., None]
        return rotated(t).reshape(*t.shape[:-2], -1)[..., :columns]


_PLANES = {bits: tuple(Plane(width, shift, split=True) for width, shift in planes) for bits, planes in {
    2: ((2, 0),), 3: ((1, 2), (2, 0)), 4: ((4, 0),), 5: ((1, 4), (4, 0)), 6: ((2, 4), (4, 0)),
    7: ((1, 6), (2, 4), (4, 0)), 8: ((8, 0),)}.items()}
CODED = {kind.name: kind for kind in (
    KVType("q8", 256, _PLANES[8]), KVType("q6", 64, _PLANES[6]), KVType("q5", 32, _PLANES[5]),
    KVType("q4", 16, _PLANES[4]), KVType("q3h", PAIR_LEVELS, _PLANES[7]), KVType("q3", 8, _PLANES[3]),
    KVType("q2", 4, _PLANES[2]))}
KV_TYPES = ("f32", "f16", *CODED)


def stored(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 [..., E] as the cache of that type (of KV_TYPES) gives it back."""
    if kind == "f32":
        return x
    if kind == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return CODED[kind].decode(*CODED[kind].encode(x), x.shape[-1])


def rotated(x: np.ndarray) -> np.ndarray:
    """Hadamard transform over the last axis, float32 [..., 32]; its own inverse."""
    for step in (16, 8, 4, 2, 1):
        low, high = np.moveaxis(x.reshape(*x.shape[:-1], -1, 2, step), -2, 0)
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
    return x * np.float32(NORM)


def _blocks(x: np.ndarray) -> np.ndarray:
    """float32 [..., blocks, 32], padded with zeros."""
    short = -x.shape[-1] % BLOCK
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]).astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)


def _up(x: np.ndarray) -> np.ndarray:
    """The next bfloat16 away from zero, as float32."""
    return ((np.ascontiguousarray(x).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def _down(x: np.ndarray) -> np.ndarray:
    """The next bfloat16 that is not larger, as float32."""
    cut = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(x < 0, _up(x), cut)
