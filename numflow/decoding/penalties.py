"""Logits processors: penalties and biases, pure functions of scores and of the text so far.

Each takes scores float [V] and returns scores float [V]: the same array if nothing changes, else a copy. ids: int32
[n], all tokens of the decoder, prompt included; new: number of generated tokens among them.
"""

from collections.abc import Mapping

import numpy as np

LONGEST_MATCH = 64  # repeated sequences longer than this are penalised as if they were this long


def logit_bias(scores: np.ndarray, bias: Mapping[int, float]) -> np.ndarray:
    """Add a bias to the scores of single tokens."""
    scores = scores.copy()
    ids = [id for id in bias if id < len(scores)]
    scores[ids] += np.array([bias[id] for id in ids], scores.dtype)
    return scores


def repetition(scores: np.ndarray, ids: np.ndarray, penalty: float, last: int = -1) -> np.ndarray:
    """Divide positive scores of tokens in the text by the penalty, multiply negative ones by it (Keskar et al. 2019).

    last: number of latest tokens considered; -1: all.
    """
    seen = np.unique(_latest(ids, last))
    seen = seen[seen < len(scores)]
    if not len(seen):
        return scores
    scores, old = scores.copy(), scores[seen]
    scores[seen] = np.where(old > 0, old / penalty, old * penalty)
    return scores


def presence_frequency(scores: np.ndarray, ids: np.ndarray, new: int, presence: float, frequency: float,
                       last: int = -1) -> np.ndarray:
    """Subtract `presence` from the score of every generated token, and `frequency` per occurrence."""
    seen, counts = np.unique(_latest(ids[len(ids) - new:], last), return_counts=True)
    if not len(seen):
        return scores
    scores = scores.copy()
    scores[seen] -= (presence + frequency * counts).astype(scores.dtype)
    return scores


def dry(scores: np.ndarray, ids: np.ndarray, multiplier: float, base: float, allowed: int,
        breakers: frozenset[int] = frozenset(), last: int = -1) -> np.ndarray:
    """Lower the scores of tokens that would continue a repetition (DRY, "don't repeat yourself").

    A token that followed an earlier occurrence of the text's last n tokens loses multiplier * base ** (n - allowed),
    for the largest such n >= `allowed`. A repetition does not extend across a token of `breakers`.
    """
    lengths = repeated(_latest(ids, last), breakers)
    found = {id: n for id, n in lengths.items() if n >= allowed and id < len(scores)}
    if not found:
        return scores
    scores = scores.copy()
    scores[list(found)] -= np.array([multiplier * base ** (n - allowed) for n in found.values()], scores.dtype)
    return scores


def repeated(ids: np.ndarray, breakers: frozenset[int] = frozenset()) -> dict[int, int]:
    """Tokens that followed an earlier occurrence of the last n tokens -> the largest such n, at most 64."""
    lengths: dict[int, int] = {}
    ends = np.arange(1, len(ids))  # positions of tokens that follow an earlier occurrence
    for n in range(1, min(LONGEST_MATCH, len(ids) - 1) + 1):
        tail = int(ids[-n])
        if tail in breakers:
            break
        ends = ends[ends >= n]
        ends = ends[ids[ends - n] == tail]
        if not len(ends):
            break
        lengths.update(dict.fromkeys(ids[ends].tolist(), n))
    return lengths


def _latest(ids: np.ndarray, last: int) -> np.ndarray:
    return ids if last < 0 else ids[max(0, len(ids) - last):]
