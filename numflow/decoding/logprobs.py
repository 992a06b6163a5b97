"""Log-probabilities of tokens under the model, before temperature, penalties and filters."""

from typing import NamedTuple

import numpy as np

from numflow.decoding.select import descending


class TokenLogprob(NamedTuple):
    """Natural logarithm of a token's probability; top: (id, logprob) of the most probable tokens, best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, ids: np.ndarray, top: int = 0) -> list[TokenLogprob]:
    """Log-probabilities of the tokens ids [n], and of the `top` most probable tokens of each row of logits float [n,
    V]."""
    norms = log_sum_exp(logits)
    return [TokenLogprob(int(id), float(row[id]) - float(norm),
                         tuple((int(best), float(row[best]) - float(norm)) for best in descending(row, top)))
            for row, id, norm in zip(logits, ids, norms, strict=True)]


def log_likelihood(logits: np.ndarray, ids: np.ndarray) -> tuple[float, bool]:
    """Sum of the log-probabilities of ids [n] under logits float [n, V], and whether each id is the most probable."""
    chosen = logits[np.arange(len(ids)), ids].astype(np.float64)
    return float(np.sum(chosen - log_sum_exp(logits))), bool(np.all(np.argmax(logits, axis=-1) == ids))


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """Log-sum-exp of logits float [n, V]; float64 [n]."""
    peaks = np.max(logits, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(logits - peaks), axis=-1, dtype=np.float64)) + peaks[..., 0].astype(np.float64)
