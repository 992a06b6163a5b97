"""A sentence on what wrong elements have in common: a factor, an offset, a permutation, or their rows and columns."""

import numpy as np

CLOSE = 1e-3  # relative difference below which factors are the same
MANY = 3      # least number of elements for a sentence about all of them
EXACT = 1e-5  # relative difference of a factor from an integer
MOVED = 0.1   # share of the largest error: permuted elements differ by less after sorting


def alike(actual: np.ndarray, expected: np.ndarray, bad: np.ndarray, heads: int = 0) -> str:
    """A sentence on what the wrong elements have in common, "" if nothing is found.

    actual, expected: [rows] or [rows, columns]; bad: mask of the wrong elements. heads: number of heads in a row.
    """
    got, wanted = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if bad.sum() < MANY:
        return _few(got[bad], wanted[bad])
    with np.errstate(all="ignore"):
        return _value(got[bad]) or _one(got, wanted, bad) or _moved(got, wanted, bad) or _nearly(
            got[bad] / wanted[bad]) or _factors(got, wanted, bad, heads) or _where(bad, heads)


def _few(got: np.ndarray, wanted: np.ndarray) -> str:
    """The factor of one or two wrong elements, if it is an integer or one over an integer."""
    with np.errstate(all="ignore"):
        ratio = got / wanted
    if not np.isfinite(ratio).all() or not ratio.all() or np.ptp(ratio) > EXACT * np.abs(ratio).min():
        return ""
    if abs(ratio[0] + 1) < EXACT:
        return "the sign is wrong"
    for factor, word in ((ratio[0], ""), (1 / ratio[0], "1 / ")):
        whole = round(float(factor))
        if 2 <= whole <= 64 and abs(factor / whole - 1) < EXACT:
            return f"that is {word}{whole} times what is expected"
    return ""


def _value(got: np.ndarray) -> str:
    if np.isnan(got).all():
        return "all of them are NaN"
    return f"all of them are {got[0]:.6g}" if np.ptp(got) == 0 else ""


def _one(got: np.ndarray, wanted: np.ndarray, bad: np.ndarray) -> str:
    """The factor or the offset that all wrong elements share."""
    ratio = got[bad] / wanted[bad]
    if _same(ratio):
        factor = float(np.median(ratio))
        if abs(factor + 1) < CLOSE:
            return "all of them have the wrong sign"
        if abs(factor - 1) >= CLOSE:
            return f"each of them is {factor:.5g} times what is expected"
    off = got[bad] - wanted[bad]
    return f"each of them is {float(np.median(off)):+.5g} off" if _same(off) else ""


def _moved(got: np.ndarray, wanted: np.ndarray, bad: np.ndarray) -> str:
    """A sentence on permuted elements: right elements in wrong rows, columns or places."""
    if np.array_equal(got, wanted) or np.ptp(wanted) == 0:
        return ""
    spread, off = max(float(np.std(wanted)), 1e-3), float(np.abs(got - wanted)[bad].max())

    def equal(axis) -> bool:
        """Whether both arrays are equal after sorting, much closer than before sorting."""
        a, b = (np.sort(x, axis=axis) for x in (got, wanted))
        return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5 * spread) and np.abs(a - b).max() < MOVED * off)

    if got.ndim == 2 and equal(1):
        return "each row has the right numbers in wrong columns"
    if got.ndim == 2 and equal(0):
        return "each column has the right numbers in wrong rows"
    return "the right numbers are in wrong places" if equal(None) else ""


def _nearly(ratio: np.ndarray) -> str:
    """The share by which all wrong elements are too large or all too small, if less than CLOSE."""
    off = ratio - 1
    if not (np.abs(off) < CLOSE).all() or np.ptp(np.sign(off)):
        return ""
    least, most = (f"{share:.2g}" for share in (np.abs(off).min(), np.abs(off).max()))
    return (f"each of them is nearly right, too {'large' if off[0] > 0 else 'small'} by {least}"
            f"{f' to {most}' if most != least else ''} of itself")


def _factors(got: np.ndarray, wanted: np.ndarray, bad: np.ndarray, heads: int) -> str:
    """Rows, heads or columns with a different factor each."""
    if got.ndim != 2:
        return ""
    ratio = np.where(bad, got / wanted, np.nan)
    by_head = ratio.reshape(-1, ratio.shape[1] // heads) if heads and ratio.shape[1] % heads == 0 else None
    for axis, groups in (("row", ratio), ("row of a head", by_head), ("column", ratio.T)):
        if groups is None:
            continue
        filled = [group[~np.isnan(group)] for group in groups if (~np.isnan(group)).sum() >= MANY]
        if len(filled) > 1 and sum(map(len, filled)) == bad.sum() and all(map(_same, filled)):
            factors = [float(np.median(group)) for group in filled]
            return (f"each {axis} has the expected values times a different factor, {min(factors):.3g} to "
                    f"{max(factors):.3g}")
    return ""


def _where(bad: np.ndarray, heads: int) -> str:
    """The heads, rows or columns that are entirely right."""
    if bad.ndim != 2:
        return ""
    parts = [("row", ~bad.any(axis=1)), ("column", ~bad.any(axis=0))]
    if heads and bad.shape[1] % heads == 0:
        parts.insert(0, ("head", ~bad.reshape(len(bad), heads, -1).any(axis=(0, 2))))
    return next((_right(axis, np.flatnonzero(right)) for axis, right in parts if right.any()), "")


def _right(axis: str, indices: np.ndarray) -> str:
    """A sentence on the right rows, columns or heads; a range if there are three or more in sequence."""
    if len(indices) == 1:
        return f"{axis} {indices[0]} is right"
    if len(indices) > 2 and np.all(np.diff(indices) == 1):
        return f"{axis}s {indices[0]} to {indices[-1]} are right"
    return f"{axis}s {', '.join(map(str, indices[:4]))}{' and more' * (len(indices) > 4)} are right"


def _same(values: np.ndarray) -> bool:
    """Whether at least three values are nearly equal, and not 0."""
    if len(values) < MANY or not np.isfinite(values).all():
        return False
    middle = float(np.median(values))
    return middle != 0 and bool((np.abs(values - middle) <= CLOSE * abs(middle)).all())
