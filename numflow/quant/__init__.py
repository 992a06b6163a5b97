"""Quantisation of float32 matrices to few bits per weight, and de-quantisation.

    scheme = find("q3h")
    raw = encode(x, scheme)                 # float32 [N, K] -> uint8 [N, scheme.row_bytes(K)]
    y = decode(raw, scheme, x.shape[1])     # -> float32 [N, K]

numflow's own schemes are q2, q3, q3h (3.5 bits), q4, q5, q6 and q8. layout.py defines their rows, search.py the search
for scales and codes. Inferflow's schemes have their full names, such as q3h_b64t1 (inferflow.py). Every scheme may keep
a share of outliers apart, such as q3h+0.5% (apart.py). Each scheme is implemented twice with the same bytes: in NumPy,
as the reference, and as compiled kernels, which the functions here call.
"""

from collections.abc import Callable

import numpy as np

from numflow.errors import RequestError, did_you_mean
from numflow.quant import apart
from numflow.quant.apart import OutlierScheme, with_outliers
from numflow.quant.inferflow import INFERFLOW_SCHEMES, InferflowScheme
from numflow.quant.layout import ROW_SCHEMES, RowScheme
from numflow.quant.outliers import Sparse, split
from numflow.quant.scheme import checked_weights

__all__ = ["SCHEMES", "AnyScheme", "InferflowScheme", "OutlierScheme", "RowScheme", "RowsOf", "Sparse", "decode",
           "encode", "encode_with_outliers", "find", "takes_calibration"]

AnyScheme = RowScheme | InferflowScheme | OutlierScheme
RowsOf = Callable[[np.ndarray, RowScheme, np.ndarray | None, str], np.ndarray]  # (x, scheme, importance, name) -> rows
SCHEMES: dict[str, RowScheme | InferflowScheme] = {**ROW_SCHEMES, **INFERFLOW_SCHEMES}


def find(name: str) -> AnyScheme:
    """The scheme of this name, case-insensitive: one of SCHEMES, or one with outliers, such as "q3h+0.5%".

    Raises:
        RequestError: no such scheme; the message suggests the nearest name.
    """
    scheme = SCHEMES.get(name.lower()) or with_outliers(name.lower(), SCHEMES)
    if scheme is None:
        raise RequestError(f"no quantisation scheme named {name!r}{did_you_mean(name.lower(), SCHEMES)}")
    return scheme


def takes_calibration(scheme: AnyScheme) -> bool:
    """Whether a scheme can use importances and second moments: only numflow's own schemes can."""
    return isinstance(scheme.base if isinstance(scheme, OutlierScheme) else scheme, RowScheme)


def encode(x: np.ndarray, scheme: AnyScheme, importance: np.ndarray | None = None, moment: np.ndarray | None = None,
           name: str = "matrix", threads: int | None = None, rows_of: RowsOf | None = None) -> np.ndarray:
    """Quantise a matrix. numflow's own schemes take either importances or a second moment from calibration.

    Args:
        x: float32 [N, K].
        importance: float32 [K] or [N, K], weights of squared errors.
        moment: [K, K], second moment of the layer's inputs, for error feedback (feedback.py).
        name: the matrix's name in error messages.
        threads: default: all processors.
        rows_of: another search for numflow's own schemes (on a GPU), with the same result.

    Returns:
        uint8 [N, scheme.row_bytes(K)]

    Raises:
        RequestError: K is no multiple of the block, there are no weights, a magnitude is out of range, or calibration
            data does not fit.
        FormatError: a NaN or an infinity among the weights.
    """
    if isinstance(scheme, OutlierScheme):
        base = scheme.base
        if importance is None and moment is None and takes_calibration(scheme):
            importance = np.ones(x.shape[1:], np.float32)  # apart.encode sets outliers to 0
        return apart.encode(x, scheme, lambda dense, c: encode(dense, base, c, moment, name, threads, rows_of),
                            lambda raw: decode(raw, base, x.shape[1], threads), importance, name)
    if isinstance(scheme, InferflowScheme):
        from numflow.quant import inferflow_kernels

        if importance is not None or moment is not None:
            raise RequestError(f"{scheme.name} has one way to find codes, which uses no calibration")
        return inferflow_kernels.encode(x, scheme, name, threads)
    from numflow.quant.layout_kernels import pack
    from numflow.quant.search_kernels import search

    if moment is None and rows_of is not None:
        return rows_of(x, scheme, importance, name)
    if moment is None:
        return pack(search(x, scheme, importance, name, threads), threads)
    from numflow.quant.feedback import search_with_feedback

    if importance is not None:
        raise RequestError(f"{name} has both importances and a second moment, which says more")
    return pack(search_with_feedback(x, scheme, moment, name, threads, rows_of), threads)


def encode_with_outliers(x: np.ndarray, scheme: AnyScheme, share: float, importance: np.ndarray | None = None,
                         name: str = "matrix", threads: int | None = None) -> tuple[np.ndarray, Sparse]:
    """Quantise a matrix with its outliers kept apart as float32: x is about decode(raw) + sparse.

    Args:
        share: maximal share of outliers, 0 to 0.05 (outliers.py); each costs 6 bytes.
        others: as `encode`.

    Returns:
        uint8 [N, scheme.row_bytes(K)], and for each outlier its value minus the decoded value.

    Raises:
        RequestError, FormatError: as `encode` and `outliers.split`.
    """
    x = checked_weights(x, scheme, name)
    dense, outliers = split(x, share)
    rows, columns = outliers.rows, outliers.columns
    if isinstance(scheme, RowScheme) and share:  # the code of an outlier does not matter: the sparse part corrects it
        importance = np.broadcast_to(np.ones(1, np.float32) if importance is None else importance, x.shape).copy()
        importance[rows, columns] = 0
    raw = encode(dense, scheme, importance, name=name, threads=threads)
    missing = x[rows, columns] - decode(raw, scheme, x.shape[1], threads)[rows, columns]
    return raw, Sparse(x.shape, outliers.starts, outliers.columns, missing)


def decode(raw: np.ndarray, scheme: AnyScheme, columns: int, threads: int | None = None) -> np.ndarray:
    """uint8 [N, scheme.row_bytes(columns)] -> float32 [N, columns].

    Raises:
        RequestError: the columns are no multiple of the block.
        FormatError: rows have another size.
    """
    if isinstance(scheme, OutlierScheme):
        return apart.decode(raw, scheme, columns, lambda rows: decode(rows, scheme.base, columns, threads))
    if isinstance(scheme, InferflowScheme):
        from numflow.quant import inferflow_kernels

        return inferflow_kernels.decode(raw, scheme, columns, threads)
    from numflow.quant import layout_kernels

    return layout_kernels.decode(raw, scheme, columns, threads)
