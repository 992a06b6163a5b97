"""Derived weights: every tensor's values follow from its name and shape, on every machine."""

import re
import zlib

import numpy as np

_NORM = re.compile(r"(norm|ln_|layer_?norm)[^.]*\.(weight|gamma)$", re.IGNORECASE)
_EXPERTS = ".tid2eid"


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float16 array: uniform with standard deviation 1 / sqrt(columns); norm weights around 1, other vectors around 0.

    A table of expert indices gets values up to 4, distinct in each row. Only raw bits of PCG64 are used, which NumPy
    promises to keep stable, not its distributions.
    """
    if name.endswith(_EXPERTS):
        rows, columns = np.indices(shape)
        return ((rows * 7 // 3 + 2 * columns) % 5).astype(np.float16)
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
    uniform = (bits >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1
    if len(shape) < 2 or max(shape) == count:
        spread, centre = 0.5, 1.0 if _NORM.search(name) else 0.0
    else:
        spread, centre = (3 / (shape[-1] or 1)) ** 0.5, 0.0
    return (centre + spread * uniform).astype(np.float16).reshape(shape)
