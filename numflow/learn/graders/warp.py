"""Grader of a student's GPU kernel with one warp per row, compared with NumPy."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numflow.cuda.lang.scalar import f32, u32
from numflow.learn.cases.verdict import Functions, Verdict, raised, right, wrong
from numflow.learn.graders.simulated import fault, run_kernel, waits

PARAMETERS = (f32.ptr, u32.ptr, f32.ptr, f32.ptr, u32)
SHAPES = ((1, 64), (4, 128), (3, 200), (2, 40))  # (rows, columns); the last two leave lanes without work


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade the kernel on every shape, each in several orders of threads."""
    for number, (rows, columns) in enumerate(SHAPES, 1):
        name, (arrays, expected) = f"{rows}x{columns}", _matrix(rows, columns)
        try:
            said, evidence = fault(functions["gemv"], PARAMETERS, rows, 32, arrays, (columns // 2,), expected)
        except Exception as error:
            return raised(name, number, len(SHAPES), error)
        if said:
            return wrong(name, number, len(SHAPES), said, evidence)
    return right(len(SHAPES), "shapes")


def exchanges(body: Callable) -> int:
    """Number of exchanges and barriers per lane, for one row of 256 weights."""
    return waits(body, PARAMETERS, 1, 32, _matrix(1, 256)[0], (128,))


def product(body: Callable, pairs: np.ndarray, scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    """y [N] by the kernel on the simulator: pairs of codes u8 [N, K / 2], scale f32 [N], x f32 [K]."""
    rows, count = pairs.shape
    arrays = np.zeros(rows, np.float32), pairs.astype(np.uint32), scale, np.ascontiguousarray(x)
    return run_kernel(body, PARAMETERS, rows, 32, arrays, (count,))


def _matrix(rows: int, columns: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The kernel's arrays, and the expected y."""
    rng = np.random.default_rng(rows + columns)
    codes = rng.integers(0, 11, (rows, columns))
    pairs = (codes[:, 0::2] + 11 * codes[:, 1::2]).astype(np.uint32)
    scale = rng.uniform(0.01, 0.1, rows).astype(np.float32)
    x = rng.standard_normal(columns).astype(np.float32)
    return (np.zeros(rows, np.float32), pairs, scale, x), ((codes - 5) * scale[:, None] @ x).astype(np.float32)
