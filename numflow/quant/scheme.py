"""Base class of all schemes, and checks of data before encoding and decoding.

A scheme stores each row of a matrix [N, K] separately: K weights, in blocks of consecutive ones, become `row_bytes(K)`
bytes.
"""

from dataclasses import dataclass

import numpy as np

from numflow.errors import FormatError, RequestError


@dataclass(frozen=True)
class Scheme:
    """A storage format for rows of weights.

    name:   lower case.
    block:  weights that share a header.
    levels: number of values of a code.
    """

    name: str
    block: int
    levels: int

    @property
    def unit(self) -> int:
        """Rows are a multiple of so many weights."""
        return self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights.

        Raises:
            RequestError: the columns are no multiple of the unit.
        """
        if columns <= 0 or columns % self.unit:
            raise RequestError(f"{self.name} has blocks of {self.unit} weights, which do not divide {columns} columns")
        return self._row_bytes(columns)

    def _row_bytes(self, columns: int) -> int:
        raise NotImplementedError

    def bits_per_weight(self, columns: int) -> float:
        """Bits per weight of a matrix with `columns` columns, every byte counted."""
        return 8 * self.row_bytes(columns) / columns


def checked_weights(x: np.ndarray, scheme: Scheme, name: str) -> np.ndarray:
    """`x` as contiguous float32 [N, K] that `scheme` can hold; `name` is its name in messages.

    Raises:
        RequestError: no matrix, no weights, or columns that are no multiple of the block.
        FormatError: a NaN or an infinity; the message names its row and column.
    """
    if x.ndim != 2 or x.size == 0:
        raise RequestError(f"{name} of shape {list(x.shape)} cannot be quantised: a matrix with weights is needed")
    try:
        scheme.row_bytes(x.shape[1])
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    with np.errstate(over="ignore"):  # overflow is detected below
        x = np.ascontiguousarray(x, np.float32)
    # min and max propagate NaN and infinity and need no mask of the whole matrix.
    if not np.isfinite(x.min()) or not np.isfinite(x.max()):
        with np.errstate(invalid="ignore"):  # both infinities in a row
            row = int(np.argmin(np.isfinite(x.sum(1, dtype=np.float64))))
        column = int(np.argmin(np.isfinite(x[row])))
        raise FormatError(f"{name} cannot be quantised: row {row}, column {column} is {x[row, column]}")
    return read_only(x)


def checked_bytes(raw: np.ndarray, scheme: Scheme, columns: int) -> np.ndarray:
    """`raw` as contiguous uint8 [N, row_bytes].

    Raises:
        RequestError: the columns are no multiple of the unit.
        FormatError: rows of another size or type.
    """
    size = scheme.row_bytes(columns)
    if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] != size:
        raise FormatError(f"{columns} weights of {scheme.name} should be rows of {size} bytes, uint8 [rows, {size}]; "
                          f"these are {raw.dtype} {list(raw.shape)}")
    return read_only(np.ascontiguousarray(raw))


def read_only(array: np.ndarray) -> np.ndarray:
    """A read-only view, so that kernels have one signature for mapped files and new arrays."""
    view = array.view()
    view.flags.writeable = False
    return view
