"""Bit planes: a plane holds some bits of each code in a block, packed from bit 0 of each byte upwards.

    Plane(4, 0)               adjacent nibbles      byte k = w[2k] | w[2k+1] << 4
    Plane(2, s)               four 2-bit fields     byte k = bits s, s+1 of w[4k] .. w[4k+3]
    Plane(1, s)               eight 1-bit fields    byte k = bit s of w[8k] .. w[8k+7]
    Plane(4, 0, split=True)   split nibbles         byte k = w[k] | w[k + n/2] << 4, for n codes
    Plane(8, 0)               plain bytes
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plane:
    """Bits [shift, shift + width) of codes. split: the fields of a byte come from different parts of the block."""

    width: int
    shift: int
    split: bool = False

    def bytes(self, codes: int) -> int:
        """Bytes of this plane for so many codes."""
        return codes * self.width // 8

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """uint8 [..., n] -> uint8 [..., n * width / 8]"""
        per_byte = 8 // self.width
        if self.split:
            fields = np.swapaxes(codes.reshape(*codes.shape[:-1], per_byte, -1), -1, -2)
        else:
            fields = codes.reshape(*codes.shape[:-1], -1, per_byte)
        fields = fields >> np.uint8(self.shift) & np.uint8((1 << self.width) - 1)
        return np.bitwise_or.reduce(fields << self._shifts, axis=-1)

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """uint8 [..., n * width / 8] -> uint8 [..., n], the bits at their position, zeros elsewhere"""
        mask = np.uint8((1 << self.width) - 1)
        fields = [(packed >> shift & mask) << np.uint8(self.shift) for shift in self._shifts]
        return np.stack(fields, axis=-2 if self.split else -1).reshape(*packed.shape[:-1], -1)

    @property
    def _shifts(self) -> np.ndarray:
        return np.arange(0, 8, self.width, dtype=np.uint8)


def pack_planes(codes: np.ndarray, planes: tuple[Plane, ...]) -> np.ndarray:
    """uint8 [..., n] -> uint8 [..., bytes of all planes], planes concatenated"""
    return np.concatenate([plane.pack(codes) for plane in planes], axis=-1)


def unpack_planes(packed: np.ndarray, planes: tuple[Plane, ...], codes: int) -> np.ndarray:
    """uint8 [..., bytes of all planes] -> uint8 [..., codes]"""
    result, offset = np.zeros((*packed.shape[:-1], codes), np.uint8), 0
    for plane in planes:
        result |= plane.unpack(packed[..., offset:offset + plane.bytes(codes)])
        offset += plane.bytes(codes)
    return result


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 [...] to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    even = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.where(np.isnan(x), x, (even & np.uint32(0xFFFF0000)).view(np.float32))
