"""Frustratingly simple decoding (Yang et al. 2023, arXiv 2305.12675): the text's own n-grams, as a language model to
move away from."""

import numpy as np

from numflow.decoding.filters import top_k
from numflow.decoding.select import Candidates


def fsd(c: Candidates, ids: np.ndarray, k: int, n: int, alpha: float, beta: float) -> Candidates:
    """The one of the k best candidates with the largest (1 - alpha) p - alpha penalty; of equal ones the lowest id.

    ids: int32 [m], the text so far, prompt included. n: longest n-grams. Probabilities are those among all of `c`.
    """
    best = top_k(c, k)
    p = np.exp(-c.surprise[np.searchsorted(c.ids, best.ids)])
    scores = (1 - alpha) * p - alpha * penalties(ids, best.ids, n, beta)
    return best.keep(np.array([int(np.argmax(scores))]))


def penalties(ids: np.ndarray, tokens: np.ndarray, n: int, beta: float) -> np.ndarray:
    """Probability float64 [k] of each of `tokens` under the smoothed n-gram model of the text `ids`.

    The longest context (n - 1 tokens) that a token has followed gets the share beta, the next shorter one beta of what
    is left, and so on; single tokens get all that is left. Without n - 1 tokens of text there is no penalty.
    """
    result, left = np.zeros(len(tokens)), np.ones(len(tokens))
    if len(ids) < n - 1:
        return result
    for size in range(n - 1, -1, -1):
        followers = ids[ends_of(ids, size)]
        counts = np.sum(followers[:, None] == tokens, axis=0)
        share = beta * counts / (len(followers) + 1) if size else counts / max(len(followers), 1)
        result += left * share
        left = np.where(counts > 0, left * (1 - beta), left)
    return result


def ends_of(ids: np.ndarray, size: int) -> np.ndarray:
    """Places of `ids` before which its last `size` tokens stand as well."""
    places = np.arange(size, len(ids))
    for back in range(1, size + 1):
        places = places[ids[places - back] == ids[-back]]
    return places
