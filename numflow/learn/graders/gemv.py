"""Matrices times vectors from pairs of codes in bytes: the check, and the time beside the least there can be."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from numflow.learn.cases.verdict import Verdict, Wrong, described, furthest, raised, right, wrong

SHAPES = ((1, 32), (1, 64), (3, 96), (20, 256))
ROUNDS = 7


def grade_gemv(gemv: Callable) -> Verdict:
    """The function on small matrices; y holds something before."""
    for number, (rows, columns) in enumerate(SHAPES, 1):
        pairs, scale, x, expected = matrix(rows, columns)
        name, y = f"{rows}x{columns}", np.full(rows, 3, np.float32)
        try:
            result = gemv(y, pairs.copy(), scale.copy(), x.copy())
            if result is not None:
                raise Wrong("gemv should write into y, and returns something")
        except Exception as error:
            return raised(name, number, len(SHAPES), error)
        spread = max(float(np.std(expected)), 1e-3)
        if place := furthest(y, expected, 1e-5 * max(float(np.abs(expected).max()), spread) / spread):
            return wrong(name, number, len(SHAPES), described(place), y, place)
    return right(len(SHAPES), "shapes")


def matrix(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """pairs, scale, x, and the product that is expected."""
    rng = np.random.default_rng(rows * columns)
    codes = rng.integers(0, 11, (rows, columns))
    scale = rng.uniform(0.01, 0.1, (rows, columns // 32)).astype(np.float32)
    x = rng.standard_normal(columns).astype(np.float32)
    w = (codes - 5) * np.repeat(scale, 32, axis=1)
    return (codes[:, 0::2] + 11 * codes[:, 1::2]).astype(np.uint8), scale, x, (w @ x).astype(np.float32)


def gemv_bars(gemv: Callable, rows: int = 8192, columns: int = 8192) -> dict[str, Any]:
    """Times of a large product: the function's, that of NumPy from float32 weights, and of reading the bytes."""
    from numflow.cpu.measure.roofline import measure_limits

    pairs, scale, x, _ = matrix(rows, columns)
    y, w = np.zeros(rows, np.float32), np.ones((rows, columns), np.float32)
    gbytes = measure_limits(1, repeat=3).read_gb_s
    moved = pairs.nbytes + scale.nbytes
    return {"what": f"{rows} x {columns} weights, one thread; {moved / 1e6:.1f} MB are read", "unit": "µs",
            "bars": [("yours", _microseconds(lambda: gemv(y, pairs, scale, x))),
                     ("NumPy, float32 weights", _microseconds(lambda: np.dot(w, x, out=y))),
                     ("reading the bytes", moved / gbytes / 1e3)]}


def _microseconds(run: Callable[[], Any]) -> float:
    """The least of some rounds, after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times[1:])
