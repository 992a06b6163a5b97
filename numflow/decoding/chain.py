"""The chain from logits to what may be drawn, as plain tables of pure functions.

    logits [V] -> PROCESSORS, in this order -> scores [V] -> constraints and grammar -> candidates
               -> pool -> FILTERS, in the order of `samplers` -> candidates to draw from

Mirostat takes the place of the filters but the temperature; FSD that of filters and drawing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from numflow.decoding import filters, penalties
from numflow.decoding.select import Candidates, every
from numflow.decoding.settings import DEFAULTS, FILTERS, Sampling

# Name of a setting -> function(scores, ids, new, settings): used where the setting is not its default.
PROCESSORS: dict[str, Callable[[np.ndarray, np.ndarray, int, Sampling], np.ndarray]] = {
    "logit_bias": lambda scores, ids, new, s: penalties.logit_bias(scores, s.logit_bias),
    "repetition_penalty": lambda scores, ids, new, s: penalties.repetition(
        scores, ids, s.repetition_penalty, s.repeat_last_n),
    "presence_penalty": lambda scores, ids, new, s: penalties.presence_frequency(
        scores, ids, new, s.presence_penalty, 0, s.repeat_last_n),
    "frequency_penalty": lambda scores, ids, new, s: penalties.presence_frequency(
        scores, ids, new, 0, s.frequency_penalty, s.repeat_last_n),
    "dry_multiplier": lambda scores, ids, new, s: penalties.dry(
        scores, ids, s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_breakers, s.repeat_last_n),
}
# Name of a setting -> function(candidates, its value): used where the value is not the one that does nothing.
STAGES: dict[str, Callable[[Candidates, Any], Candidates]] = {
    "temperature": filters.temperature, "min_p": filters.min_p, "top_k": filters.top_k, "tfs_z": filters.tail_free,
    "typical_p": filters.typical, "top_p": filters.top_p}


def processed(logits: np.ndarray, ids: np.ndarray, new: int, settings: Sampling) -> np.ndarray:
    """Scores float [V] after bias and penalties; the same array if nothing changes it.

    ids: int32 [n], the decoder's tokens so far, of which the last `new` were generated.
    """
    for name, function in PROCESSORS.items():
        if getattr(settings, name) != DEFAULTS[name]:
            logits = function(logits, ids, new, settings)
    return logits


def candidates(scores: np.ndarray, pool_size: int = 0) -> Candidates:
    """Tokens of scores [V] that may come, or the pool_size best of them."""
    c = Candidates(every(len(scores)), scores)
    if np.min(scores) == -np.inf:
        c = c.keep(scores > -np.inf)
    return filters.top_k(c, pool_size) if pool_size else c


def narrowed(c: Candidates, settings: Sampling) -> Candidates:
    """The candidates that the filters leave, with the scores they have made of them."""
    for name in settings.samplers:
        value = getattr(settings, name)
        if value not in (FILTERS[name], 0):  # 0 is a filter that is off, and no temperature
            c = STAGES[name](c, value)
    return c
