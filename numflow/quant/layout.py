"""numflow's own schemes: layout of a row of a quantised matrix, and the formulas for its weights.

A row of K weights, K a multiple of 32, holds
    2 bytes             the row's header, little-endian: from the top 9 bits base code, 5 bits step code, 2 bits window
    one bit stream      the headers of all blocks: scale code S, then zero code Z, lowest bit first, padded to a byte
    K / 32 units        the codes of 32 weights each, as bit planes (bits.py)

    weight = scale * (code - zero)
    scale  = the float32 whose bit pattern is B + S * D
    zero   = (levels - 1) * (1/2 + ((Z + 1/2) / 2^zero_bits - 1/2) / 2^window)

    B = (base code + 108) << 21;   a base code of 0 makes all weights of the row 0
    D = (4 + step code % 4) << (step code // 4 + 18 - scale_bits)

Equal steps of a float's bit pattern are nearly equal factors, so the scales of a row's blocks lie on a geometric grid.
Each row has its own grid: magnitudes from 2^-100 to 2^27, a span from 1/8 to over 24 octaves, and no underflow as with
float16. Zero points lie in a window around the middle code, which is as narrow as the row's blocks allow.

q3h is the 3.5-bit scheme: 11 levels, two weights in 7 bits as 11 * second + first, without padding bits. The codes of a
unit are 16 pairs in 14 bytes.
"""

from dataclasses import dataclass, field

import numpy as np

from numflow.quant.bits import Plane, pack_planes, unpack_planes
from numflow.quant.scheme import Scheme, checked_bytes

UNIT = 32          # weights of a unit
HEADER_BYTES = 2   # of a row
PAIR_LEVELS = 11
WINDOWS, STEP_CODES, BASE_CODES = 4, 32, 512
BASE_SHIFT, BASE_BIAS = 21, 108  # a base code counts quarters of an octave from 2^-100


@dataclass(frozen=True)
class RowScheme(Scheme):
    """One of numflow's own schemes.

    scale_bits, zero_bits: bits of the scale code and the zero code in a block's header.
    planes:    bit planes of the codes of a unit.
    narrowest: smallest clipping range that the search tries, as a fraction of a block's range.
    """

    scale_bits: int
    zero_bits: int
    planes: tuple[Plane, ...]
    narrowest: float

    @property
    def unit(self) -> int:
        return UNIT

    @property
    def paired(self) -> bool:
        """Whether two weights share a code."""
        return self.levels == PAIR_LEVELS

    @property
    def unit_codes(self) -> int:
        """Number of codes in a unit."""
        return UNIT // 2 if self.paired else UNIT

    @property
    def unit_bytes(self) -> int:
        """Bytes of the codes of a unit."""
        return sum(plane.bytes(self.unit_codes) for plane in self.planes)

    @property
    def header_bits(self) -> int:
        """Bits of a block's header."""
        return self.scale_bits + self.zero_bits

    def stream_bytes(self, columns: int) -> int:
        """Bytes of a row's block headers."""
        return -(-(columns // self.block) * self.header_bits // 8)

    def _row_bytes(self, columns: int) -> int:
        return HEADER_BYTES + self.stream_bytes(columns) + columns // UNIT * self.unit_bytes

    def zeros(self) -> np.ndarray:
        """Exact zero points by window and zero code, float32 [4, 2^zero_bits]."""
        z, windows = (np.arange(1 << self.zero_bits) + 0.5) / (1 << self.zero_bits), np.arange(WINDOWS)[:, None]
        return ((self.levels - 1) * (0.5 + (z - 0.5) / (1 << windows))).astype(np.float32)

    def steps(self) -> np.ndarray:
        """D of each step code, int32 [32]."""
        code = np.arange(STEP_CODES, dtype=np.int32)
        return (4 + code % 4) << (code // 4 + 18 - self.scale_bits)


# Bit planes by bits of a code; 1-bit codes are 0 and 2.
CODE_PLANES = {
    1: (Plane(1, 1),), 2: (Plane(2, 0),), 3: (Plane(1, 2), Plane(2, 0)), 4: (Plane(4, 0),),
    5: (Plane(1, 4), Plane(4, 0)), 6: (Plane(2, 4), Plane(4, 0)), 7: (Plane(1, 6), Plane(2, 4), Plane(4, 0)),
    8: (Plane(8, 0),),
}

ROW_SCHEMES = {scheme.name: scheme for scheme in (
    RowScheme("q2", 16, 4, 3, 3, CODE_PLANES[2], 0.35),
    RowScheme("q3", 16, 8, 3, 3, CODE_PLANES[3], 0.5),
    RowScheme("q3h", 32, PAIR_LEVELS, 3, 3, CODE_PLANES[7], 0.55),
    RowScheme("q4", 32, 16, 6, 6, CODE_PLANES[4], 0.7),
    RowScheme("q5", 32, 32, 6, 6, CODE_PLANES[5], 0.78),
    RowScheme("q6", 32, 64, 6, 6, CODE_PLANES[6], 0.84),
    RowScheme("q8", 32, 256, 6, 6, CODE_PLANES[8], 0.92),
)}


@dataclass(frozen=True)
class Fields:
    """The fields of a quantised matrix [N, K], unpacked.

    rows:   uint16 [N], row headers.
    blocks: uint16 [N, K / block], S | Z << scale_bits.
    codes:  uint8 [N, K], 0 .. levels - 1.
    """

    scheme: RowScheme
    rows: np.ndarray = field(repr=False)
    blocks: np.ndarray = field(repr=False)
    codes: np.ndarray = field(repr=False)

    def row_grids(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """B int32 [N] (0 for a row of zeros), D int32 [N], and the zero point of each Z, float32 [N, 2^zero_bits]."""
        base, step, window = (self.rows >> 7).astype(np.int32), self.rows >> 2 & 31, self.rows & 3
        return ((np.where(base > 0, base + BASE_BIAS, 0) << BASE_SHIFT), self.scheme.steps()[step],
                self.scheme.zeros()[window])

    def scales_and_zeros(self) -> tuple[np.ndarray, np.ndarray]:
        """Scale and zero point of each block, float32 [N, K / block] each."""
        base, step, zeros = self.row_grids()
        s = (self.blocks & (1 << self.scheme.scale_bits) - 1).astype(np.int32)
        scales = np.where(base[:, None] > 0, base[:, None] + s * step[:, None], 0).view(np.float32)
        return scales, np.take_along_axis(zeros, self.blocks >> self.scheme.scale_bits, axis=1)

    def values(self) -> np.ndarray:
        """The weights, float32 [N, K]."""
        scales, zeros = (np.repeat(part, self.scheme.block, axis=1) for part in self.scales_and_zeros())
        return scales * (self.codes - zeros)


def pack_reference(fields: Fields) -> np.ndarray:
    """Fields -> uint8 [N, row_bytes], in NumPy."""
    scheme, n = fields.scheme, len(fields.rows)
    shifts = np.arange(scheme.header_bits, dtype=np.uint16)
    stream = (fields.blocks[:, :, None] >> shifts & 1).astype(np.uint8).reshape(n, -1)
    codes = fields.codes
    if scheme.paired:
        codes = codes[:, 0::2] + PAIR_LEVELS * codes[:, 1::2]
    units = pack_planes(codes.reshape(n, -1, scheme.unit_codes), scheme.planes)
    return np.concatenate([fields.rows.astype("<u2")[:, None].view(np.uint8), np.packbits(stream, 1, "little"),
                           units.reshape(n, -1)], axis=1)


def unpack_reference(raw: np.ndarray, scheme: RowScheme, columns: int) -> Fields:
    """uint8 [N, row_bytes] -> Fields, in NumPy.

    Raises:
        RequestError, FormatError: as `scheme.checked_bytes`.
    """
    raw = checked_bytes(raw, scheme, columns)
    n, blocks, first = len(raw), columns // scheme.block, HEADER_BYTES + scheme.stream_bytes(columns)
    bits = np.unpackbits(raw[:, HEADER_BYTES:first], axis=1, count=blocks * scheme.header_bits, bitorder="little")
    shifts = np.arange(scheme.header_bits, dtype=np.uint16)
    headers = (bits.reshape(n, blocks, -1).astype(np.uint16) << shifts).sum(axis=2, dtype=np.uint16)
    codes = unpack_planes(raw[:, first:].reshape(n, -1, scheme.unit_bytes), scheme.planes, scheme.unit_codes)
    if scheme.paired:
        codes = np.stack([codes % PAIR_LEVELS, np.minimum(codes // PAIR_LEVELS, PAIR_LEVELS - 1)], axis=-1)
    rows = np.ascontiguousarray(raw[:, :HEADER_BYTES]).view("<u2")[:, 0].astype(np.uint16)
    return Fields(scheme, rows, headers, codes.reshape(n, columns))


def decode_reference(raw: np.ndarray, scheme: RowScheme, columns: int) -> np.ndarray:
    """uint8 [N, row_bytes] -> float32 [N, columns], in NumPy."""
    return unpack_reference(raw, scheme, columns).values()
