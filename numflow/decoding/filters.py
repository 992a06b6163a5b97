"""Strategies that narrow down the candidates or reshape their probabilities: pure functions, none sorts them all.

Each takes `Candidates` and its one parameter, keeps at least one candidate, and leaves ids in rising order. Scores
need not be normalised. docs/decoding.md has the formulas and sources side by side.
"""

import math

import numpy as np

from numflow.decoding.select import Candidates, descending, leading, top
from numflow.decoding.weights import UNIT, part

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e30  # beyond, scores are those of these


def temperature(c: Candidates, t: float) -> Candidates:
    """Scores divided by t: below 1 sharper, above 1 flatter."""
    if np.float32(divisor(t)) == 1:
        return c
    with np.errstate(over="ignore"):  # far below the best one
        return Candidates(c.ids, (c.scores - np.max(c.scores)) / divisor(t))


def divisor(t: float) -> float:
    """A temperature above 0 as scores are divided by it: a float32 that is neither 0 nor infinite."""
    return min(max(float(t), LEAST_TEMPERATURE), MOST_TEMPERATURE)


def top_k(c: Candidates, k: int) -> Candidates:
    """The k most probable; of equal ones at the border those with the lower id (Fan et al. 2018)."""
    return c if k >= len(c.ids) else c.keep(top(c.scores, k))


def top_p(c: Candidates, p: float) -> Candidates:
    """The fewest, most probable first, that hold at least p of the probability (nucleus; Holtzman et al. 2020)."""
    weights = c.weights
    wanted = max(part(weights, float(np.sum(weights, dtype=np.float64)), p), UNIT)
    return c.keep(leading(c.scores, lambda places: _enough(weights, places, wanted)))


def _enough(weights, places, wanted) -> int | None:
    """Number of leading places that hold the wanted weight; None: more places are needed to tell."""
    held = np.cumsum(weights[places], dtype=np.float64)
    if held[-1] < wanted and len(places) < len(weights):
        return None
    return min(int(np.searchsorted(held, wanted)) + 1, len(places))


def min_p(c: Candidates, p: float) -> Candidates:
    """Those at least p times as probable as the best one (Nguyen et al. 2024)."""
    return c.keep(c.scores - np.max(c.scores) >= math.log(p))


def tail_free(c: Candidates, z: float) -> Candidates:
    """Cuts the tail where the sorted probabilities have ceased to bend (Phenix and Egan 2019).

    The absolute second differences of the sorted probabilities are normalised and cumulated; the first candidate is
    kept, and every next one as long as the cumulated sum does not exceed z. The last two never are: they have none.
    """
    if len(c.ids) < 3:
        return c
    weights = c.exponentials

    def wanted(places):
        head = weights[places].astype(np.float64)
        bends = np.cumsum(np.abs(np.diff(head, 2)))
        # What was not seen bends by at most twice the last value seen, all of it together.
        unseen = 0.0 if len(places) == len(weights) else 2 * head[-2]
        if bends[-1] == 0 and not unseen:
            return len(places)  # a line: it has no tail
        totals = z * np.array([bends[-1], bends[-1] + unseen])
        least, most = np.searchsorted(bends[:-1], totals, side="right").tolist()
        return 1 + least if not unseen or least == most < len(bends) - 1 else None

    return c.keep(leading(weights, wanted))


def typical(c: Candidates, p: float) -> Candidates:
    """Those whose surprise is nearest to the entropy, as few as hold at least p (Meister et al. 2023)."""
    weights, surprise = c.exponentials, c.surprise
    total = np.sum(weights, dtype=np.float64)
    entropy = np.vdot(weights, surprise) / total
    return c.keep(leading(-np.abs(surprise - surprise.dtype.type(entropy)),
                          lambda places: _enough(weights, places, p * total)))


def surprise_limit(c: Candidates, bits: float) -> Candidates:
    """Those whose surprise -log2 p is at most `bits`, and the best one in any case."""
    kept = c.surprise <= bits * math.log(2)
    kept[int(np.argmax(c.scores))] = True
    return c.keep(kept)


def zipf_exponent(c: Candidates, count: int = 100) -> float:
    """The exponent s of Zipf's law p_i ~ 1 / i^s, fitted to the `count` most probable candidates."""
    scores = c.scores[descending(c.scores, count)]
    ranks = np.log(np.arange(1, len(scores) + 1))
    t, b = np.diff(ranks), -np.diff(scores)
    seen = np.isfinite(b)
    return float(np.sum(t[seen] * b[seen]) / np.sum(t[seen] ** 2)) if np.any(seen) else math.inf
