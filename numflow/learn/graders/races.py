"""Grader of four small kernels with shared memory, with detection of data races."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numflow.cuda.lang.scalar import f32
from numflow.learn.cases.verdict import Functions, Verdict, raised, right, wrong
from numflow.learn.graders.simulated import fault, waits


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade each kernel: once with race detection, then in several orders of threads."""
    cases = _cases()
    for number, (name, (grid, arrays, expected)) in enumerate(cases.items(), 1):
        parameters = (f32.ptr,) * len(arrays)
        try:
            said, evidence = fault(functions[name], parameters, grid, 64, arrays, (), expected, 1e-4)
        except Exception as error:
            return raised(name, number, len(cases), error)
        if said:
            return wrong(name, number, len(cases), said, evidence)
    return right(len(cases), "kernels")


def barriers(name: str, body: Callable) -> int:
    """Number of barriers per thread of a kernel."""
    grid, arrays, _ = _cases()[name]
    return waits(body, (f32.ptr,) * len(arrays), grid, 64, arrays)


def _cases() -> dict[str, tuple[int, tuple, np.ndarray]]:
    """By kernel: number of blocks, arrays, and the expected content of the first array."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal(64).astype(np.float32)
    a, b = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    return {
        "scan": (1, (np.zeros(64, np.float32), x), np.cumsum(x, dtype=np.float64)),
        "transpose": (1, (np.zeros(64, np.float32), x), x.reshape(8, 8).T.copy()),
        "reduction": (1, (np.zeros(1, np.float32), x), np.array([x.sum(dtype=np.float64)])),
        "product": (4, (np.zeros((16, 16), np.float32), a, b), a @ b)}
