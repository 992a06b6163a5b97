"""Frustratingly simple decoding (Yang et al. 2023, arXiv 2305.12675): tokens are penalised by their probability under
an n-gram model of the text so far."""

import numpy as np

from numflow.decoding.filters import top_k
from numflow.decoding.select import Candidates


def fsd(c: Candidates, ids: np.ndarray, k: int, n: int, alpha: float, beta: float) -> Candidates:
    """Candidate with the largest (1 - alpha) p - alpha penalty among the k best; ties: lowest id.

    ids: int32 [m], the text so far, prompt included. n: maximum n-gram size. p: probability among all candidates `c`.
    """
    best = top_k(c, k)
    p = np.exp(-c.surprise[np.searchsorted(c.ids, best.ids)])
    scores = (1 - alpha) * p - alpha * penalties(ids, best.ids, n, beta)
    return best.keep(np.array([int(np.argmax(scores))]))


def penalties(ids: np.ndarray, tokens: np.ndarray, n: int, beta: float) -> np.ndarray:
    """Probability float64 [k] of each of `tokens` under the smoothed n-gram model of the text `ids`.

    The longest context (n - 1 tokens) that a token has followed gets weight beta, the next shorter context beta of the
    remaining weight, and so on; unigrams get all remaining weight. Texts shorter than n - 1 tokens have no penalty.
    """
    result, remaining = np.zeros(len(tokens)), np.ones(len(tokens))
    if len(ids) < n - 1:
        return result
    for size in range(n - 1, -1, -1):
        followers = ids[ends_of(ids, size)]
        counts = np.sum(followers[:, None] == tokens, axis=0)
        share = beta * counts / (len(followers) + 1) if size else counts / max(len(followers), 1)
        result += remaining * share
        remaining = np.where(counts > 0, remaining * (1 - beta), remaining)
    return result


def ends_of(ids: np.ndarray, size: int) -> np.ndarray:
    """Positions in `ids` that follow an earlier occurrence of its last `size` tokens."""
    positions = np.arange(size, len(ids))
    for back in range(1, size + 1):
        positions = positions[ids[positions - back] == ids[-back]]
    return positions
