"""Inferflow's block schemes, byte for byte, with their quirks, for compatibility.

A block is a header, then the bit planes of its codes (bits.py), highest bits first. w = base + code * scale in float32,
with base and scale stored as float16, except in the symmetric scheme and in the one with a header of two bytes.

Codes are rounded once, within the range from a block's smallest to its largest weight:
    NEAREST    scale = (max - min) / (levels - 1), base = min            code = floor((x - min) / scale + 0.5)
    MID_RISE   scale = (max - min) / levels,       base = min + scale/2  code = floor((x - min) / scale + 0.0001)
    SYMMETRIC  scale = max |x| / 127                                     code = x / scale, halves away from zero
Quirks: codes are computed with the header before its rounding; with a scale below 1e-5 every code is 0, so small
weights vanish; the 64-wide schemes of 4, 5 and 6 bits never use their highest code.

q3h_b64t1 pairs weights of 11 levels: a 7-bit code is 11 * w[2p + 1] + w[2p], with 32 codes in a block of 64.
"""

from dataclasses import dataclass, field

import numpy as np

from numflow.errors import RequestError, did_you_mean
from numflow.quant.bits import Plane, pack_planes, unpack_planes
from numflow.quant.scheme import Scheme, checked_bytes, checked_weights

NEAREST, MID_RISE, SYMMETRIC, BYTES = range(4)  # rounding rules; BYTES: NEAREST on a coarse grid, 2-byte headers
_SMALLEST_SCALE = np.float32(1e-5)
_HALF, _ALMOST_ZERO = np.float32(0.5), np.float32(0.0001)
PAIR_LEVELS = 11


@dataclass(frozen=True)
class InferflowScheme(Scheme):
    """A scheme of Inferflow.

    size:        bytes of a block.
    rule:        rounding rule.
    planes:      bit planes of the codes, as stored.
    scale_first: the header is scale, base instead of base, scale.
    paired:      two weights share a code.
    """

    rule: int
    planes: tuple[Plane, ...]
    scale_first: bool = False
    paired: bool = False
    size: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "size", self.header + sum(plane.bytes(self.codes) for plane in self.planes))

    def _row_bytes(self, columns: int) -> int:
        return columns // self.block * self.size

    @property
    def codes(self) -> int:
        """Number of codes in a block."""
        return self.block // 2 if self.paired else self.block

    @property
    def header(self) -> int:
        """Bytes of a block's header."""
        return 4 if self.rule in (NEAREST, MID_RISE) else 2


def _scheme(name, block, rule, levels, *planes, **options):
    return InferflowScheme(name, block, levels, rule, tuple(Plane(*plane) for plane in planes), **options)


INFERFLOW_SCHEMES = {scheme.name: scheme for scheme in (
    _scheme("q8_b32t1", 32, NEAREST, 256, (8, 0)),
    _scheme("q8_b32t2", 32, SYMMETRIC, 255, (8, 0)),
    _scheme("q6_b64t1", 64, NEAREST, 63, (2, 4), (4, 0)),
    _scheme("q5_b64t1", 64, NEAREST, 31, (1, 4), (4, 0)),
    _scheme("q5_b32t1", 32, NEAREST, 32, (1, 4), (4, 0, True), scale_first=True),
    _scheme("q4_b64t1", 64, NEAREST, 15, (4, 0)),
    _scheme("q4_b32t1a", 32, NEAREST, 16, (4, 0)),
    _scheme("q4_b32t1b", 32, MID_RISE, 16, (4, 0)),
    _scheme("q4_b16", 16, BYTES, 16, (4, 0)),
    _scheme("q3h_b64t1", 64, NEAREST, PAIR_LEVELS, (1, 6), (2, 4), (4, 0), paired=True),
    _scheme("q3_b32t1a", 32, NEAREST, 8, (1, 2), (2, 0)),
    _scheme("q3_b32t1b", 32, MID_RISE, 8, (1, 2), (2, 0)),
    _scheme("q2_b32t1a", 32, NEAREST, 4, (2, 0)),
    _scheme("q2_b32t1b", 32, MID_RISE, 4, (2, 0)),
)}

# Names in Inferflow's configuration files.
INFERFLOW_NAMES = {
    "q8": "q8_b32t2", "q6": "q6_b64t1", "q5": "q5_b64t1", "q4": "q4_b32t1a", "q3h": "q3h_b64t1", "q3": "q3_b32t1b",
    "q2": "q2_b32t1b", "q4_b32t1": "q4_b32t1a", "q3_b32t1": "q3_b32t1b", "q2_b32t1": "q2_b32t1b",
}


def inferflow_scheme(name: str) -> InferflowScheme:
    """Inferflow's scheme of this name, case-insensitive: short ("Q3H") or full ("q3h_b64t1").

    Raises:
        RequestError: no such scheme.
    """
    known = INFERFLOW_NAMES.get(name.lower(), name.lower())
    if known not in INFERFLOW_SCHEMES:
        names = (*INFERFLOW_SCHEMES, *INFERFLOW_NAMES)
        raise RequestError(f"Inferflow has no scheme {name!r}{did_you_mean(known, names)}")
    return INFERFLOW_SCHEMES[known]


def encode_reference(x: np.ndarray, scheme: InferflowScheme, name: str = "matrix") -> np.ndarray:
    """float32 [N, K] -> uint8 [N, row_bytes], in NumPy."""
    x = checked_weights(x, scheme, name)
    blocks = x.reshape(-1, scheme.block)
    with np.errstate(over="ignore", invalid="ignore"):  # header_bytes refuses overflows
        base, scale, start = headers(blocks, scheme)
    header = header_bytes(base, scale, scheme, name)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale < _SMALLEST_SCALE, np.float32(0), 1 / scale)[:, None]
    if scheme.rule == SYMMETRIC:
        ratio = blocks * inverse
        codes = np.copysign(np.floor(np.abs(ratio) + _HALF), ratio).astype(np.int8).view(np.uint8)
    else:
        rounding = _ALMOST_ZERO if scheme.rule == MID_RISE else _HALF
        codes = np.floor((blocks - start[:, None]) * inverse + rounding)
        codes = np.clip(codes, 0, scheme.levels - 1).astype(np.uint8)
    if scheme.paired:
        codes = codes[:, 0::2] + PAIR_LEVELS * codes[:, 1::2]
    stored = np.concatenate([header, pack_planes(codes, scheme.planes)], axis=1)
    return stored.reshape(x.shape[0], -1)


def decode_reference(raw: np.ndarray, scheme: InferflowScheme, columns: int) -> np.ndarray:
    """uint8 [N, row_bytes] -> float32 [N, columns], in NumPy."""
    raw = checked_bytes(raw, scheme, columns)
    blocks = raw.reshape(-1, scheme.size)
    base, scale = stored_headers(blocks, scheme)
    codes = unpack_planes(blocks[:, scheme.header:], scheme.planes, scheme.codes)
    if scheme.paired:
        codes = np.stack([codes % PAIR_LEVELS, codes // PAIR_LEVELS], axis=-1).reshape(-1, scheme.block)
    signed = codes.view(np.int8) if scheme.rule == SYMMETRIC else codes
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged header gives the file's value
        return (base[:, None] + signed.astype(np.float32) * scale[:, None]).reshape(raw.shape[0], -1)


def headers(blocks: np.ndarray, scheme: InferflowScheme) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Base, scale and the value of code 0's lower end, float32 [B] each, not rounded."""
    if scheme.rule == SYMMETRIC:
        largest = np.abs(blocks).max(axis=1)
        return np.zeros_like(largest), largest / np.float32(127), np.zeros_like(largest)
    rows = np.arange(len(blocks))  # the first of equals, as in Inferflow: 0 and -0 differ in bytes
    low, high = blocks[rows, blocks.argmin(axis=1)], blocks[rows, blocks.argmax(axis=1)]
    if scheme.rule == BYTES:
        low = np.floor(low * np.float32(100)) / np.float32(100)
    scale = (high - low) / np.float32(scheme.levels if scheme.rule == MID_RISE else scheme.levels - 1)
    return (low + scale * _HALF if scheme.rule == MID_RISE else low), scale, low


def header_bytes(base: np.ndarray, scale: np.ndarray, scheme: InferflowScheme, name: str) -> np.ndarray:
    """Headers uint8 [B, header] of base and scale.

    Raises:
        RequestError: a value is out of the header's range.
    """
    if scheme.rule == BYTES:
        fields = np.floor([base * np.float32(100) + np.float32(100.5), scale * np.float32(1000) + _HALF]).T
        if fields.min() < 0 or fields.max() > 255:
            raise RequestError(f"{name}: {scheme.name} holds smallest weights of -1 to 1.55 and ranges up to 3.8 only")
        return fields.astype(np.uint8)
    parts = [scale] if scheme.rule == SYMMETRIC else [scale, base] if scheme.scale_first else [base, scale]
    with np.errstate(over="ignore"):
        fields = np.stack(parts, axis=1).astype("<f2")
    if not np.isfinite(fields).all():
        raise RequestError(f"{name}: {scheme.name} has float16 headers, which weights beyond 65504 do not fit")
    return fields.view(np.uint8)


def stored_headers(blocks: np.ndarray, scheme: InferflowScheme) -> tuple[np.ndarray, np.ndarray]:
    """Base and scale of stored blocks uint8 [B, size], float32 [B] each."""
    fields = blocks[:, :scheme.header]
    if scheme.rule == BYTES:
        return fields[:, 0] / np.float32(100) - np.float32(1), fields[:, 1] / np.float32(1000)
    first, *second = np.ascontiguousarray(fields).view("<f2").astype(np.float32).T
    if scheme.rule == SYMMETRIC:
        return np.zeros_like(first), first
    return (second[0], first) if scheme.scale_first else (first, second[0])
