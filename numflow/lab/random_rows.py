"""Random rows of any stored type: uniformly random codes, and scales that give small weights.

Speed does not depend on the values, as long as the scales are normal floats: products that are denormal float32 are
slower on CPUs.
"""

import numpy as np

from numflow.formats.types import TYPES
from numflow.quant.hub_types import HUB_TYPES, SIZES, HubType

_SCALE = 0.0005
_E4M3_ONE = 0x38
# Byte offsets of the float16 scales in a block of a GGUF type; default: offset 0.
_HALVES: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": ()}


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Random rows of a quantised GGUF type, or of a type of quantised checkpoints: uint8 [rows, row_bytes].

    columns: a multiple of the type's block.
    """
    rng = np.random.default_rng(rows + columns)
    if kind in HUB_TYPES:
        return _of_hub(HUB_TYPES[kind], rows, columns, rng)
    block, size = TYPES[kind].block, TYPES[kind].size
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for offset in _HALVES.get(kind, (0,)):
        raw[..., offset:offset + 2] = np.array([_SCALE], np.float16).view(np.uint8)
    if kind == "IQ1_M":  # the scale has four bits in each of the last four pairs of bytes: 2^-11
        raw[..., 49::2] = raw[..., 49::2] & 15
        raw[..., 55] |= 0x10
    if kind == "MXFP4":
        raw[..., 0] = 118
    if kind == "NVFP4":
        raw[..., :4] = 8
    return raw.reshape(rows, -1)


def _of_hub(hub: HubType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    blocks = columns // hub.block if hub.block else 1
    units = rng.integers(0, 256, (rows, columns // 16, hub.unit_bytes), dtype=np.uint8)
    if hub.by_16:
        units[..., 0] = _E4M3_ONE
    if hub.bits == 8 and hub.table:
        units &= 0x5F
        units |= 8  # neither denormal, nor infinite or NaN
    header = np.concatenate([_typed(_SCALE, hub.scale), _typed((1 << hub.bits) / 2, hub.zeros)])
    parts = np.tile(header, (rows, blocks, 1)), units.reshape(rows, blocks, -1)
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def _typed(value: float, kind: str) -> np.ndarray:
    """A scale or zero of a type, as bytes."""
    if kind == "BF16":
        return np.array([value], "<f4").view("u1")[2:]
    names = {"": "u1", "U8": "u1", "F16": "<f2", "F32": "<f4"}
    return np.array([value], names[kind]).view("u1")[:SIZES[kind]]
