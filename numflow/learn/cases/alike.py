"""The sentence about what wrong numbers have in common: a factor, an offset, other places, or where they are."""

import numpy as np

CLOSE = 1e-3  # of factors that count as one
MANY = 3      # numbers that it takes to speak of all
EXACT = 1e-5  # of a factor that is a whole number
MOVED = 0.1   # of the largest error: right numbers in other places differ by less when both are sorted


def alike(actual: np.ndarray, expected: np.ndarray, bad: np.ndarray, heads: int = 0) -> str:
    """The property that wrong numbers have in common, "" if none is seen.

    actual, expected: [rows] or [rows, columns]; bad: where they differ.
    """
    got, wanted = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if bad.sum() < MANY:
        return _few(got[bad], wanted[bad])
    with np.errstate(all="ignore"):
        return _value(got[bad]) or _one(got, wanted, bad) or _moved(got, wanted, bad) or _nearly(
            got[bad] / wanted[bad]) or _factors(got, wanted, bad, heads) or _where(bad, heads)


def _few(got: np.ndarray, wanted: np.ndarray) -> str:
    """The factor of one or two numbers, where it is a whole number or one over a whole number."""
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
    """The factor or the offset that all share."""
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
    """The wrong places in which right numbers stand."""
    if np.array_equal(got, wanted) or np.ptp(wanted) == 0:
        return ""
    spread, off = max(float(np.std(wanted)), 1e-3), float(np.abs(got - wanted)[bad].max())

    def equal(axis) -> bool:
        """Whether the sorted numbers are the same, much nearer than they are in their places."""
        a, b = (np.sort(x, axis=axis) for x in (got, wanted))
        return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5 * spread) and np.abs(a - b).max() < MOVED * off)

    if got.ndim == 2 and equal(1):
        return "each row has the right numbers in other columns"
    if got.ndim == 2 and equal(0):
        return "each column has the right numbers in other rows"
    return "the right numbers stand in other places" if equal(None) else ""


def _nearly(ratio: np.ndarray) -> str:
    """The share by which all are too large or all too small, where it is less than CLOSE."""
    off = ratio - 1
    if not (np.abs(off) < CLOSE).all() or np.ptp(np.sign(off)):
        return ""
    least, most = (f"{share:.2g}" for share in (np.abs(off).min(), np.abs(off).max()))
    return (f"each of them is nearly right, too {'large' if off[0] > 0 else 'small'} by {least}"
            f"{f' to {most}' if most != least else ''} of itself")


def _factors(got: np.ndarray, wanted: np.ndarray, bad: np.ndarray, heads: int) -> str:
    """Rows, heads or columns that have a factor of their own."""
    if got.ndim != 2:
        return ""
    ratio = np.where(bad, got / wanted, np.nan)
    by_head = ratio.reshape(-1, ratio.shape[1] // heads) if heads and ratio.shape[1] % heads == 0 else None
    for what, groups in (("row", ratio), ("row of a head", by_head), ("column", ratio.T)):
        if groups is None:
            continue
        filled = [group[~np.isnan(group)] for group in groups if (~np.isnan(group)).sum() >= MANY]
        if len(filled) > 1 and sum(map(len, filled)) == bad.sum() and all(map(_same, filled)):
            factors = [float(np.median(group)) for group in filled]
            return (f"each {what} is what is expected times a factor of its own, {min(factors):.3g} to "
                    f"{max(factors):.3g}")
    return ""


def _where(bad: np.ndarray, heads: int) -> str:
    """The part that is wrong, where another is all right."""
    if bad.ndim != 2:
        return ""
    parts = [("row", ~bad.any(axis=1)), ("column", ~bad.any(axis=0))]
    if heads and bad.shape[1] % heads == 0:
        parts.insert(0, ("head", ~bad.reshape(len(bad), heads, -1).any(axis=(0, 2))))
    return next((_right(what, np.flatnonzero(right)) for what, right in parts if right.any()), "")


def _right(what: str, places: np.ndarray) -> str:
    """A sentence about rows, columns or heads that are right; of three and more that follow one another, the ends."""
    if len(places) == 1:
        return f"{what} {places[0]} is right"
    if len(places) > 2 and np.all(np.diff(places) == 1):
        return f"{what}s {places[0]} to {places[-1]} are right"
    return f"{what}s {', '.join(map(str, places[:4]))}{' and more' * (len(places) > 4)} are right"


def _same(values: np.ndarray) -> bool:
    """Whether at least three numbers are one, nearly, and not 0."""
    if len(values) < MANY or not np.isfinite(values).all():
        return False
    middle = float(np.median(values))
    return middle != 0 and bool((np.abs(values - middle) <= CLOSE * abs(middle)).all())
