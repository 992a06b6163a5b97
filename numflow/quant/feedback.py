"""Error-feedback rounding (GPTQ, arXiv 2210.17323): a weight's rounding error is made up for by the weights after it.

A layer computes W a for inputs a, so what counts is not the error of the weights but (W' - W) M (W' - W)^T, with the
second moment M = E[a a^T] of the layer's inputs. Columns are quantised from the first to the last; with U, the upper
Cholesky factor of M's inverse, the error of column j changes column k > j by

    e_j = (w_j - decoded_j) / U_jj,      w_k -= e_j * U_jk

before it is quantised itself. A row's header is found beforehand, for importances 1 / U_jj^2; a block's header is found
when its turn comes, for the weights as they have become by then.
"""

import numpy as np

from numflow.errors import RequestError
from numflow.quant.layout import Fields, RowScheme
from numflow.quant.scheme import checked_weights, read_only
from numflow.quant.search_kernels import best_header, block_range, grid, nearest, row_scales, search, work_space
from numflow.quant.threads import kernel, over_rows

DAMPING = 0.01  # of the mean second moment, added to each column's: keeps M well-conditioned
_STRIPE = 128   # columns whose errors reach the columns after them in one matrix product


def search_with_feedback(x: np.ndarray, scheme: RowScheme, moment: np.ndarray, name: str = "matrix",
                         threads: int | None = None) -> Fields:
    """Headers and codes of x float32 [N, K] with error feedback.

    Args:
        moment: [K, K], second moment of the inputs that the matrix is multiplied with, any positive factor times it.

    Raises:
        RequestError: as `search`; or a moment of another shape, with NaN or infinities, or with negative diagonal.
        FormatError: as `search`.
    """
    x = checked_weights(x, scheme, name)
    upper = inverse_factor(moment, x.shape[1], name)
    c = (1 / np.square(np.diagonal(upper), dtype=np.float64))[None]
    c = read_only((c / c.max()).astype(np.float32))
    fields = search(x, scheme, c, name, threads)
    w, columns = x.copy(), x.shape[1]
    for first in range(0, columns, _STRIPE):
        last = min(first + _STRIPE, columns)
        errors = np.empty((len(w), last - first), np.float32)
        over_rows(_stripe, len(w), threads, w, c, upper, first, *grid(scheme), fields.rows, fields.blocks, fields.codes,
                  errors)
        w[:, last:] -= errors @ upper[first:last, last:]
    return fields


def inverse_factor(moment: np.ndarray, columns: int, name: str) -> np.ndarray:
    """U float32 [K, K], upper, with U^T U the inverse of the damped moment.

    Raises:
        RequestError: the moment has another shape, NaN or infinities, or a negative diagonal.
    """
    if moment.shape != (columns, columns):
        raise RequestError(f"the second moment of the inputs of {name} should be [{columns}, {columns}], "
                           f"is {list(moment.shape)}")
    m = np.array(moment, np.float64)
    diagonal = np.diagonal(m).copy()
    if not np.isfinite(m).all() or diagonal.min() < 0:
        raise RequestError(f"the second moment of the inputs of {name} has NaN, infinities or a negative diagonal")
    m[np.diag_indices(columns)] += DAMPING * diagonal.mean() if diagonal.any() else 1.0
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(m))
        return read_only(np.linalg.cholesky(inverse.T @ inverse).T.astype(np.float32, order="C"))
    except np.linalg.LinAlgError:
        raise RequestError(f"the second moment of the inputs of {name} is no second moment: "
                           "it has negative directions") from None


@kernel
def _stripe(w, c, upper, begin_column, block, top, scale_bits, narrowest, steps, zeros, rows, blocks, codes, errors, begin,
            end):
    """Quantise columns [begin_column, begin_column + S) of w f32 [N, K], which changes; errors f32 [N, S] are filled."""
    work = work_space(scale_bits)
    stripe = errors.shape[1]
    for row in range(begin, end):
        header, weights = np.int64(rows[row]), w[row]
        if header >> 7 == 0:
            errors[row] = np.float32(0)
            continue
        scales, row_zeros = row_scales(header, scale_bits, steps), zeros[header & 3]
        for first in range(begin_column, begin_column + stripe, block):
            part = weights[first:first + block]
            low, high = block_range(part)
            chosen = best_header(part, c[0, first:first + block], low, high, scales, header & 3, top, scale_bits, narrowest,
                                 row_zeros, work)[1]
            blocks[row, first // block] = chosen
            scale, zero = scales[chosen & ((1 << scale_bits) - 1)], row_zeros[chosen >> scale_bits]
            inverse = np.float32(1) / scale
            for j in range(first, first + block):
                code = nearest(weights[j] * inverse + zero, top)
                codes[row, j] = np.uint8(code)
                error = (weights[j] - scale * (code - zero)) / upper[j, j]
                errors[row, j - begin_column] = error
                for k in range(j + 1, begin_column + stripe):
                    weights[k] -= error * upper[j, k]
