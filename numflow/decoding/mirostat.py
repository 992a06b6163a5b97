"""Mirostat (Basu et al. 2021): keeps the surprise of the text near a target by a limit that follows what was drawn."""

import math

import numpy as np

from numflow.decoding.filters import surprise_limit, top_k, zipf_exponent
from numflow.decoding.select import Candidates


class Mirostat:
    """The limit of one request, and the candidates it leaves.

    version: 1: the number of candidates is computed from the limit as if the distribution followed Zipf's law, and the
             surprise of a token is that of the whole distribution, as in the authors' program; 2: candidates more
             surprising than the limit are dropped, and the surprise is that of what is left, as it is usually done.
    mu:      the limit in bits; begins at twice the target.
    """

    def __init__(self, version: int, tau: float, eta: float):
        self.version, self.tau, self.eta, self.mu = version, tau, eta, 2 * tau
        self._drawn: Candidates | None = None  # whose probabilities tell how surprising the drawn token is

    def narrow(self, c: Candidates) -> Candidates:
        """The candidates to draw from."""
        if self.version == 2:
            self._drawn = surprise_limit(c, self.mu)
            return self._drawn
        self._drawn = c
        return top_k(c, zipf_count(zipf_exponent(c), self.mu, len(c.ids)))

    def accept(self, id: int) -> None:
        """Correct the limit by the error of the token that was drawn from the last candidates."""
        c = self._drawn
        if c is None or id not in c.ids:
            return  # chosen by something else, such as a forced last token
        surprise = float(c.surprise[np.searchsorted(c.ids, id)]) / math.log(2)
        self.mu -= self.eta * (surprise - self.tau)

    def copy(self) -> "Mirostat":
        """One that goes its own way from here."""
        twin = Mirostat(self.version, self.tau, self.eta)
        twin.mu, twin._drawn = self.mu, self._drawn
        return twin


def zipf_count(s: float, mu: float, size: int) -> int:
    """Number of the best tokens, 1 .. size, whose cross-entropy under Zipf's law with exponent s is mu bits."""
    if s <= 0 or size == 1:
        return size
    if math.isinf(s):
        return 1
    epsilon = s - 1
    scale = 1 / math.log(size) if abs(epsilon) < 1e-9 else epsilon / (1 - size**-epsilon)
    exponent = (mu + math.log2(scale)) / s
    return size if exponent > 60 else min(max(round(2**exponent) + 1, 1), size)
