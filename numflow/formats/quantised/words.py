"""Unpacking of codes from words."""

from dataclasses import dataclass

import numpy as np


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes of each row, u8 [n, count]; lowest bits first, no code crosses a word boundary.

    words: [n, W] of 8, 16 or 32 bits.
    """
    each = 8 * words.itemsize // bits
    if 8 % bits == 0:
        data = np.ascontiguousarray(words).view(np.uint8)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (data[..., None] >> shifts & ((1 << bits) - 1)).reshape(len(words), -1)[:, :count]
    shifts = np.arange(0, each * bits, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


def unpacked_stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes of each row, packed without gaps across word boundaries."""
    if 32 % bits == 0:
        return unpacked(words, bits, count)
    data = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    fields = data[:, :data.shape[1] // bits * bits].reshape(len(words), -1, bits)[:, :count]
    return np.packbits(fields, axis=2, bitorder="little")[..., 0]


def unpacked_planes(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes of each row, in bit planes: per 32 codes first the low 4 bits (2 of 3), then the
    others."""
    if 32 % bits == 0:
        return unpacked(words, bits, count)
    codes, first = np.zeros((len(words), words.shape[1] // bits * 32), np.uint8), 0
    by_32 = np.ascontiguousarray(words).reshape(len(words), -1, bits)
    for width, low in _PLANES[bits]:
        plane = np.ascontiguousarray(by_32[:, :, first:first + width]).reshape(len(words), -1)
        codes |= unpacked(plane, width, codes.shape[1]) << np.uint8(low)
        first += width
    return codes[:, :count]


_PLANES = {3: ((2, 0), (1, 2)), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4)), 7: ((4, 0), (2, 4), (1, 6))}  # width, bit


@dataclass(frozen=True)
class Packing:
    """A layout of codes in 32-bit words, lowest bits first.

    dense: codes may cross word boundaries (compressed-tensors from 0.18 on).
    """

    bits: int
    dense: bool = False

    def width(self, count: int) -> int:
        """Number of words for `count` codes."""
        return -(-count * self.bits // 32) if self.dense else -(-count // (32 // self.bits))

    def codes(self, words: np.ndarray, count: int) -> np.ndarray:
        """The first `count` codes of each row of words [n, W], u8 [n, count]."""
        return (unpacked_stream if self.dense else unpacked)(words, self.bits, count)


def packing_of(columns: int, words: int, stated: set[int], dense: bool) -> Packing | None:
    """The layout in which `columns` codes take `words` words; None if there is none.

    stated: allowed numbers of bits, empty for all. dense: the preferred layout.
    """
    fitting = [packing for bits in range(8, 0, -1) for packing in (Packing(bits, dense), Packing(bits, not dense))
               if packing.width(columns) == words]
    return next((packing for packing in fitting if not stated or packing.bits in stated), None)


def of_bits(stated: set[int]) -> str:
    """Text of the configured numbers of bits, for messages."""
    return f" of {' or '.join(map(str, sorted(stated)))} bits" if stated else ""
