"""What every block scheme has in common, and the checks that data passes before it is encoded.

A scheme cuts each row of a matrix [N, K] into blocks of `block` consecutive weights and stores each block in `size`
bytes. Rows are independent: a row of K weights takes K / block * size bytes.
"""

from dataclasses import dataclass

import numpy as np

from numflow.errors import FormatError, RequestError


@dataclass(frozen=True)
class Scheme:
    """A way to store blocks of weights.

    name:   as in tables and files, lower case.
    block:  weights of one block.
    size:   bytes of one block, header included.
    levels: values a code may have.
    """

    name: str
    block: int
    size: int
    levels: int

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, every byte counted."""
        return 8 * self.size / self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights.

        Raises:
            RequestError: blocks do not divide the columns.
        """
        if columns <= 0 or columns % self.block:
            raise RequestError(f"{self.name} has blocks of {self.block} weights, which do not divide {columns} columns")
        return columns // self.block * self.size

    def columns(self, row_bytes: int) -> int:
        """Weights in a row of `row_bytes` bytes.

        Raises:
            FormatError: no whole number of blocks.
        """
        if row_bytes % self.size:
            raise FormatError(f"a row of {row_bytes} bytes is no whole number of {self.name} blocks of {self.size}")
        return row_bytes // self.size * self.block


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
        row = int(np.argmin(np.isfinite(x.sum(1, dtype=np.float64))))
        column = int(np.argmin(np.isfinite(x[row])))
        raise FormatError(f"{name} cannot be quantised: row {row}, column {column} is {x[row, column]}")
    return _read_only(x)


def checked_bytes(raw: np.ndarray, scheme: Scheme) -> np.ndarray:
    """`raw` as contiguous uint8 [N, row_bytes] of whole blocks.

    Raises:
        FormatError: anything else.
    """
    if raw.ndim != 2 or raw.dtype != np.uint8:
        raise FormatError(f"{scheme.name} rows should be uint8 [rows, bytes], are {raw.dtype} {list(raw.shape)}")
    scheme.columns(raw.shape[1])
    return _read_only(np.ascontiguousarray(raw))


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: kernels are compiled once, for mapped files and for fresh arrays alike."""
    view = array.view()
    view.flags.writeable = False
    return view
