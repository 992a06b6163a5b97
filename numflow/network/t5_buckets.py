"""Relative position buckets of T5: the row of the bias table for each distance."""

import math

import numpy as np


def bucket(distance: np.ndarray, count: int, reach: int, causal: bool) -> np.ndarray:
    """Bucket of each distance (key - query position), 0 .. count - 1.

    Half of the buckets are exact small distances, the rest grow logarithmically up to `reach`. Without causality the
    upper half of all buckets is for keys after the query.
    """
    if causal:
        back, first = np.maximum(-distance, 0), np.zeros_like(distance)
    else:
        count //= 2
        back, first = np.abs(distance), np.where(distance > 0, count, 0)
    exact = count // 2
    ratio = np.log(np.maximum(back, exact).astype(np.float32) / exact) / np.float32(math.log(reach / exact))
    log_bucket = np.minimum(exact + (ratio * (count - exact)).astype(np.int64), count - 1)
    return first + np.where(back < exact, back, log_bucket)
