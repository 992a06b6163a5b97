"""Types of matrix states: how a state that recurrent steps keep is stored between blocks of tokens."""

import numpy as np

from numflow.quant.bits import to_bfloat16

STATE_BLOCK = 16  # tokens after which a state is rounded to its type, at fixed positions of a text
STATE_TYPES = ("f32", "f16", "bf16", "q8")  # q8: 8 bits a number, and a float32 scale for each row
SMALLEST = np.float32(1e-30)  # of a row's largest number, below which all are stored as zeros


def stored(state: np.ndarray, dtype: str) -> np.ndarray:
    """Rows f32 [..., dv] as memory of a type gives them back."""
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return state.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return to_bfloat16(state)
    if dtype == "q8":
        most = np.abs(state).max(axis=-1, keepdims=True)
        some = most > SMALLEST
        inverse = np.where(some, np.float32(127) / np.where(some, most, np.float32(1)), np.float32(0))
        return np.rint(state * inverse) * np.where(some, most / np.float32(127), np.float32(0))
    return state


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of a row of so many numbers."""
    return {"f32": 4 * columns, "f16": 2 * columns, "bf16": 2 * columns, "q8": columns + 4}[dtype]
