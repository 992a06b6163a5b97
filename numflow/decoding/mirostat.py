"""Mirostat (Basu et al. 2021): keeps the surprise of the text near a target with an adaptive surprise limit."""

import math

import numpy as np

from numflow.decoding.filters import surprise_limit, top_k, zipf_exponent
from numflow.decoding.select import Candidates


class Mirostat:
    """State of Mirostat for one request.

    version: 1: the number of candidates follows from the limit under Zipf's law, and the surprise of a token is taken
             under the full distribution, as in the authors' program; 2: candidates with a surprise above the limit are
             dropped, and the surprise is taken under the distribution of the rest, as usual.
    mu:      surprise limit in bits; starts at twice the target.
    """

    def __init__(self, version: int, tau: float, eta: float):
        self.version, self.tau, self.eta, self.mu = version, tau, eta, 2 * tau
        self._drawn: Candidates | None = None  # the distribution that gives the surprise of the sampled token

    def narrow(self, c: Candidates) -> Candidates:
        """Candidates to sample from."""
        if self.version == 2:
            self._drawn = surprise_limit(c, self.mu)
            return self._drawn
        self._drawn = c
        return top_k(c, zipf_count(zipf_exponent(c), self.mu, len(c.ids)))

    def accept(self, id: int) -> None:
        """Update the limit by the surprise error of the sampled token."""
        c = self._drawn
        if c is None or id not in c.ids:
            return  # not sampled here: a forced last token, for example
        surprise = float(c.surprise[np.searchsorted(c.ids, id)]) / math.log(2)
        self.mu -= self.eta * (surprise - self.tau)

    def copy(self) -> "Mirostat":
        """Independent copy."""
        twin = Mirostat(self.version, self.tau, self.eta)
        twin.mu, twin._drawn = self.mu, self._drawn
        return twin


def zipf_count(s: float, mu: float, size: int) -> int:
    """Number of best tokens, 1 .. size, whose cross-entropy under Zipf's law with exponent s is mu bits."""
    if s <= 0 or size == 1:
        return size
    if math.isinf(s):
        return 1
    epsilon = s - 1
    scale = 1 / math.log(size) if abs(epsilon) < 1e-9 else epsilon / (1 - size**-epsilon)
    exponent = (mu + math.log2(scale)) / s
    return size if exponent > 60 else min(max(round(2**exponent) + 1, 1), size)
