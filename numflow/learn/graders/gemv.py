"""Grader and benchmark of matrix times vector from pairs of codes in bytes."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from numflow.learn.cases.build import CaseBuilder
from numflow.learn.cases.verdict import Verdict, Wrong, described, furthest, raised, right, wrong
from numflow.learn.graders.reference import microseconds
from numflow.quant import encode, find

SHAPES = ((1, 32), (1, 64), (3, 96), (20, 256))
ROUNDS = 7
DRAWN = 32  # random rows of numflow's matrix; the other rows repeat them


def grade_gemv(gemv: Callable) -> Verdict:
    """Grade the function on small matrices. y is not zero before the call."""
    for number, (rows, columns) in enumerate(SHAPES, 1):
        pairs, scale, x, expected = matrix(rows, columns)
        name, y = f"{rows}x{columns}", np.full(rows, 3, np.float32)
        try:
            result = gemv(y, pairs.copy(), scale.copy(), x.copy())
            if result is not None:
                raise Wrong("gemv should write into y and return nothing, but it returns a value")
        except Exception as error:
            return raised(name, number, len(SHAPES), error)
        spread = max(float(np.std(expected)), 1e-3)
        if place := furthest(y, expected, 1e-5 * max(float(np.abs(expected).max()), spread) / spread):
            return wrong(name, number, len(SHAPES), described(place), y, place)
    return right(len(SHAPES), "shapes")


def matrix(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A random case: pairs, scale, x, and the expected product."""
    rng = np.random.default_rng(rows * columns)
    codes = rng.integers(0, 11, (rows, columns))
    scale = rng.uniform(0.01, 0.1, (rows, columns // 32)).astype(np.float32)
    x = rng.standard_normal(columns).astype(np.float32)
    w = (codes - 5) * np.repeat(scale, 32, axis=1)
    return (codes[:, 0::2] + 11 * codes[:, 1::2]).astype(np.uint8), scale, x, (w @ x).astype(np.float32)


def gemv_bars(gemv: Callable, rows: int = 8192, columns: int = 8192) -> dict[str, Any]:
    """Times of a large product: by the function, by numflow's 3.5-bit kernels, by NumPy with float32 weights, and of
    reading the bytes only."""
    from numflow.cpu.measure.roofline import measure_limits

    pairs, scale, x, _ = matrix(rows, columns)
    y, w = np.zeros(rows, np.float32), np.ones((rows, columns), np.float32)
    gbytes = measure_limits(1, repeat=3).read_gb_s
    moved = pairs.nbytes + scale.nbytes
    theirs = rows * find("q3h").row_bytes(columns)
    return {"what": f"{rows} x {columns} weights, one thread; {moved / 1e6:.1f} MB are read, by numflow's kernels "
                    f"{theirs / 1e6:.1f}", "unit": "µs",
            "bars": [("yours", _microseconds(lambda: gemv(y, pairs, scale, x))),
                     ("numflow, q3h", _numflow(rows, columns, "f32")),
                     ("numflow, q3h, x in int8", _numflow(rows, columns, "int8")),
                     ("NumPy, float32 weights", _microseconds(lambda: np.dot(w, x, out=y))),
                     ("reading the bytes", moved / gbytes / 1e3)]}


def _numflow(rows: int, columns: int, activations: str) -> float:
    """Time of numflow's kernel for a matrix of this size with 3.5-bit weights (q3h)."""
    from numflow.cpu.program import Program

    builder = CaseBuilder("gemv")
    drawn = encode(builder.normal(DRAWN, columns), find("q3h"))
    (x,) = builder.inputs(columns)
    y = builder.buffer(rows)
    name = builder.weight("w", drawn[np.arange(rows) % DRAWN], kind="q3h", shape=(rows, columns))
    builder.step("linear", (x,), (y,), {"weight": name})
    case = builder.case(y, (((0, 1),),))
    return microseconds(case, Program, ("linear",), threads=1, activations=activations)


def _microseconds(run: Callable[[], Any]) -> float:
    """Minimum time of ROUNDS calls, after one warm-up."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times[1:])
