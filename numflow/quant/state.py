"""Storage types of the matrix states of recurrent steps."""

import numpy as np

from numflow.quant.bits import to_bfloat16

STATE_BLOCK = 16  # a state is rounded to its type after so many tokens, at fixed positions
STATE_TYPES = ("f32", "f16", "bf16", "q8")  # q8: 8 bits per element, and a float32 scale per row
SMALLEST = np.float32(1e-30)  # rows with a smaller maximum are stored as zeros


def stored(state: np.ndarray, dtype: str) -> np.ndarray:
    """Rows f32 [..., dv] after storage in a type."""
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return state.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return to_bfloat16(state)
    if dtype == "q8":
        largest = np.abs(state).max(axis=-1, keepdims=True)
        nonzero = largest > SMALLEST
        inverse = np.where(nonzero, np.float32(127) / np.where(nonzero, largest, np.float32(1)), np.float32(0))
        return np.rint(state * inverse) * np.where(nonzero, largest / np.float32(127), np.float32(0))
    return state


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of a row of so many columns."""
    return {"f32": 4 * columns, "f16": 2 * columns, "bf16": 2 * columns, "q8": columns + 4}[dtype]
