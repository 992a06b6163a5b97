"""Codes of a few bits out of the words they are packed in."""

import numpy as np


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes of rows of words, u8 [n, count]; lowest bits first, none cut by the end of a word.

    words: [n, W] of 8 or 32 bits.
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
    """The same of codes that follow each other without gaps, over the ends of words."""
    if 32 % bits == 0:
        return unpacked(words, bits, count)
    data = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    fields = data[:, :data.shape[1] // bits * bits].reshape(len(words), -1, bits)[:, :count]
    return np.packbits(fields, axis=2, bitorder="little")[..., 0]


def packed_bits(columns: int, words: int, stated: set[int]) -> int | None:
    """Bits of codes, `columns` of which take so many words of 32 bits; of several the one that is stated."""
    fitting = [bits for bits in range(1, 9) if -(-columns // (32 // bits)) == words]
    return next((bits for bits in fitting if bits in stated), fitting[-1] if fitting else None)
