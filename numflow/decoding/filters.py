"""Sampling filters: pure functions that drop candidates or change their probabilities. None sorts all candidates.

Each takes `Candidates` and one parameter, keeps at least one candidate, and keeps ids in ascending order. Scores need
not be normalised. docs/decoding.md has the formulas and sources.
"""

import math

import numpy as np

from numflow.decoding.select import Candidates, descending, leading, top
from numflow.decoding.weights import UNIT, part

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e30  # temperatures are clamped to this range


def temperature(c: Candidates, t: float) -> Candidates:
    """Scores divided by t: below 1 sharpens the distribution, above 1 flattens it."""
    if np.float32(divisor(t)) == 1:
        return c
    with np.errstate(over="ignore"):  # scores far below the best one
        return Candidates(c.ids, (c.scores - np.max(c.scores)) / divisor(t))


def divisor(t: float) -> float:
    """Clamp a temperature above 0 so that it is neither 0 nor infinite as float32."""
    return min(max(float(t), LEAST_TEMPERATURE), MOST_TEMPERATURE)


def top_k(c: Candidates, k: int) -> Candidates:
    """The k most probable candidates; ties at the border: lower ids (Fan et al. 2018)."""
    return c if k >= len(c.ids) else c.keep(top(c.scores, k))


def top_p(c: Candidates, p: float) -> Candidates:
    """Smallest set of most probable candidates with total probability p or more (nucleus; Holtzman et al. 2020)."""
    weights = c.weights
    wanted = max(part(weights, float(np.sum(weights, dtype=np.float64)), p), UNIT)
    return c.keep(leading(c.scores, lambda indices: _enough(weights, indices, wanted)))


def _enough(weights, indices, wanted) -> int | None:
    """Number of leading indices with a total weight of `wanted`; None: more indices are needed."""
    cumulative = np.cumsum(weights[indices], dtype=np.float64)
    if cumulative[-1] < wanted and len(indices) < len(weights):
        return None
    return min(int(np.searchsorted(cumulative, wanted)) + 1, len(indices))


def min_p(c: Candidates, p: float) -> Candidates:
    """Candidates at least p times as probable as the best one (Nguyen et al. 2024)."""
    return c.keep(c.scores - np.max(c.scores) >= math.log(p))


def tail_free(c: Candidates, z: float) -> Candidates:
    """Tail-free sampling: cut the tail by the second derivative of the sorted probabilities (Phenix and Egan 2019).

    The absolute second differences of the sorted probabilities are normalised and cumulated. The first candidate is
    kept, and each next one as long as the cumulated sum is at most z. The last two are dropped: they have no second
    difference.
    """
    if len(c.ids) < 3:
        return c
    weights = c.exponentials

    def wanted(indices):
        head = weights[indices].astype(np.float64)
        curvature = np.cumsum(np.abs(np.diff(head, 2)))
        # The second differences of all unseen values sum to at most twice the last seen value.
        unseen = 0.0 if len(indices) == len(weights) else 2 * head[-2]
        if curvature[-1] == 0 and not unseen:
            return len(indices)  # a straight line: no tail
        totals = z * np.array([curvature[-1], curvature[-1] + unseen])
        low, high = np.searchsorted(curvature[:-1], totals, side="right").tolist()
        return 1 + low if not unseen or low == high < len(curvature) - 1 else None

    return c.keep(leading(weights, wanted))


def typical(c: Candidates, p: float) -> Candidates:
    """Smallest set of candidates with surprise nearest to the entropy and total probability p or more (Meister et al.
    2023)."""
    weights, surprise = c.exponentials, c.surprise
    total = np.sum(weights, dtype=np.float64)
    entropy = np.vdot(weights, surprise) / total
    return c.keep(leading(-np.abs(surprise - surprise.dtype.type(entropy)),
                          lambda indices: _enough(weights, indices, p * total)))


def surprise_limit(c: Candidates, bits: float) -> Candidates:
    """Candidates with surprise -log2 p of at most `bits`, and always the best one."""
    keep = c.surprise <= bits * math.log(2)
    keep[int(np.argmax(c.scores))] = True
    return c.keep(keep)


def zipf_exponent(c: Candidates, count: int = 100) -> float:
    """Exponent s of Zipf's law p_i ~ 1 / i^s, fitted to the `count` most probable candidates."""
    scores = c.scores[descending(c.scores, count)]
    ranks = np.log(np.arange(1, len(scores) + 1))
    t, b = np.diff(ranks), -np.diff(scores)
    seen = np.isfinite(b)
    return float(np.sum(t[seen] * b[seen]) / np.sum(t[seen] ** 2)) if np.any(seen) else math.inf
