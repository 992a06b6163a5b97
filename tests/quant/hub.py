"""Rows of types of quantised checkpoints (numflow.quant.hub_types): any codes that stand for numbers."""

import numpy as np

from numflow.quant.hub_types import HUB_TYPES, TABLES


def hub_rows(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """u8 [rows, row_bytes], with scales of both signs and of any size, and zeros among the codes."""
    hub = HUB_TYPES[kind]
    shape = rows, columns // hub.block
    scales = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 0, shape)
    parts = [_bytes(scales, hub.scale)]
    if hub.zero:
        parts.append(_bytes(rng.integers(0, 1 << hub.bits, shape) + 0.5, hub.scale))
    if hub.by_16:
        parts.append(rng.integers(0, 120, (*shape, hub.block // 16), dtype=np.uint8))
    codes = rng.integers(0, 256, (*shape, hub.block * hub.bits // 8), dtype=np.uint8)
    if hub.table and hub.bits == 8:
        codes[~np.isfinite(TABLES[hub.table])[codes]] = 5
    return np.concatenate([*parts, codes], axis=2).reshape(rows, -1)


def _bytes(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        stored = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    else:
        stored = values.astype({"F16": "<f2", "F32": "<f4"}[kind])
    return stored[..., None].view(np.uint8)
