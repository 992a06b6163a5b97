"""The common part of all schemes, and the checks that data passes before encoding.

A scheme stores each row of a matrix [N, K] on its own: K weights, cut into blocks of consecutive ones, become
`row_bytes(K)` bytes.
"""

from dataclasses import dataclass

import numpy as np

from numflow.errors import FormatError, RequestError


@dataclass(frozen=True)
class Scheme:
    """A way to store rows of weights.

    name:   as in tables and files, lower case.
    block:  weights that share a header.
    levels: values a code may have.
    """

    name: str
    block: int
    levels: int

    @property
    def unit(self) -> int:
        """Weights that a row is a multiple of."""
        return self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights.

        Raises:
            RequestError: units do not divide the columns.
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
    """`x` as contiguous float32 [N, K] that `scheme` can hold; `name` is what messages call it.

    Raises:
        RequestError: not a matrix, nothing in it, or blocks do not divide its columns.
        FormatError: a NaN or an infinity; the message has its row and column.
    """
    if x.ndim != 2 or x.size == 0:
        raise RequestError(f"{name} of shape {list(x.shape)} cannot be quantised: a matrix with weights is needed")
    try:
        scheme.row_bytes(x.shape[1])
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    with np.errstate(over="ignore"):  # what is too large for float32 is found just below
        x = np.ascontiguousarray(x, np.float32)
    # Smallest and largest let NaN and infinity through, and need no mask of the whole matrix.
    if not np.isfinite(x.min()) or not np.isfinite(x.max()):
        with np.errstate(invalid="ignore"):  # both infinities in a row
            row = int(np.argmin(np.isfinite(x.sum(1, dtype=np.float64))))
        column = int(np.argmin(np.isfinite(x[row])))
        raise FormatError(f"{name} cannot be quantised: row {row}, column {column} is {x[row, column]}")
    return read_only(x)


def checked_bytes(raw: np.ndarray, scheme: Scheme, columns: int) -> np.ndarray:
    """`raw` as contiguous uint8 [N, row_bytes].

    Raises:
        RequestError: units do not divide the columns.
        FormatError: anything else.
    """
    size = scheme.row_bytes(columns)
    if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] != size:
        raise FormatError(f"{columns} weights of {scheme.name} should be rows of {size} bytes, uint8 [rows, {size}]; "
                          f"these are {raw.dtype} {list(raw.shape)}")
    return read_only(np.ascontiguousarray(raw))


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: kernels are compiled once, for mapped files and for fresh arrays alike."""
    view = array.view()
    view.flags.writeable = False
    return view
