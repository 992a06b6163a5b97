"""Random rows of the types of quantised checkpoints (numflow.quant.hub_types)."""

import numpy as np

from numflow.cuda.lang.float8 import e4m3_code
from numflow.quant.bits import pack_planes
from numflow.quant.hub_types import HUB_TYPES, TABLES
from numflow.quant.stored import STORED

# Some of them, in which each way of codes, scales, zeros and blocks is found.
SAMPLES = ("I4_BF16_32", "I8_F32_ROW", "I6_F16_64", "U3_F16_32", "U2_BF16_16", "U4_F16_128", "U5_F32_64", "U1_F16_ROW",
           "U7_F32_16", "Z4_BF16_64", "Z8_F16_ROW", "Z2_F32_128", "NF4_64", "FP4_16", "E4M3_ROW", "E5M2_128", "E4M3_16",
           "E2M1_ROW")
TYPES_TESTED = tuple(name for name in STORED if name not in HUB_TYPES or name in SAMPLES)


def hub_rows(kind: str, rows: int, columns: int, rng: np.random.Generator, most: float = np.inf) -> np.ndarray:
    """u8 [rows, row_bytes], with scales of both signs and many magnitudes, and zero points among the codes.

    most: bound of codebook values, and of the scales of 16 columns. If finite, 8-bit weights with zero points, which
    may lie far from 0, are scaled down too, so that products with wide matrices fit float16.
    """
    hub = HUB_TYPES[kind]
    shape = rows, columns // hub.block if hub.block else 1
    scales = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 0, shape)
    if hub.zeros and hub.bits == 8 and most < np.inf:
        scales /= 32
    header = [_bytes(scales, hub.scale)]
    if hub.zeros:
        header.append(_bytes(rng.integers(0, 1 << hub.bits, shape) + 0.5 * (hub.zeros != "U8"), hub.zeros))
    codes = rng.integers(0, 1 << hub.bits, (rows, columns // 16, 16), dtype=np.uint8)
    if hub.table and hub.bits == 8:
        codes[~(np.abs(TABLES[hub.table]) <= min(most, 1e9))[codes]] = 5
    units = pack_planes(codes << 1 if hub.bits == 1 else codes, hub.planes)
    if hub.by_16:
        scales16 = rng.integers(0, min(120, 57 + 8 * np.log2(most)), (*units.shape[:2], 1), dtype=np.uint8)
        units = np.concatenate([scales16, units], axis=2)
    return np.concatenate([*header, units.reshape(*shape, -1)], axis=2).reshape(rows, -1)


def float8_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Rows of normally distributed weights, quantised to E4M3 by their absolute maximum: u8 [rows, row_bytes]."""
    hub, rng = HUB_TYPES[kind], np.random.default_rng(rows)
    blocks = rng.standard_normal((rows, columns // (hub.block or columns), hub.block or columns)) * columns ** -0.5
    scales = np.abs(blocks).max(2) / 448
    units = pack_planes(e4m3_code(blocks / scales[..., None]).astype(np.uint8).reshape(rows, -1, 16), hub.planes)
    return np.concatenate([_bytes(scales, "F32"), units.reshape(*scales.shape, -1)], axis=2).reshape(rows, -1)


def _bytes(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        stored = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    else:
        stored = values.astype({"U8": "u1", "F16": "<f2", "F32": "<f4"}[kind])
    return stored[..., None].view(np.uint8)
