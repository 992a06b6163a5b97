"""Sampling chain: from logits to the candidates to sample from, as plain tables of pure functions.

    logits [V] -> PROCESSORS, in this order -> scores [V] -> constraints and grammar -> candidates
               -> pool -> FILTERS, in the order of `samplers` -> candidates to sample from

Mirostat replaces all filters but the temperature; FSD replaces filters and sampling.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from numflow.decoding import filters, penalties
from numflow.decoding.select import Candidates, all_indices
from numflow.decoding.settings import DEFAULTS, FILTERS, Sampling

# Logits processors: name of a setting -> function(scores, ids, new, settings); applied if the setting is not its
# default.
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
# Filters: name of a setting -> function(candidates, value of the setting); applied if the value is not "off".
STAGES: dict[str, Callable[[Candidates, Any], Candidates]] = {
    "temperature": filters.temperature, "min_p": filters.min_p, "top_k": filters.top_k, "tfs_z": filters.tail_free,
    "typical_p": filters.typical, "top_p": filters.top_p}


def processed(logits: np.ndarray, ids: np.ndarray, new: int, settings: Sampling) -> np.ndarray:
    """Scores float [V] after bias and penalties; the same array if nothing changes.

    ids: int32 [n], the tokens so far; the last `new` of them were generated.
    """
    for name, function in PROCESSORS.items():
        if getattr(settings, name) != DEFAULTS[name]:
            logits = function(logits, ids, new, settings)
    return logits


def candidates(scores: np.ndarray, pool_size: int = 0) -> Candidates:
    """Allowed tokens of scores [V], or the pool_size best of them."""
    c = Candidates(all_indices(len(scores)), scores)
    if np.min(scores) == -np.inf:
        c = c.keep(scores > -np.inf)
    return filters.top_k(c, pool_size) if pool_size else c


def filtered(c: Candidates, settings: Sampling) -> Candidates:
    """Apply temperature and filters: the remaining candidates with their scores."""
    for name in settings.samplers:
        value = getattr(settings, name)
        if value not in (FILTERS[name], 0):  # 0: the filter is off, or there is no temperature
            c = STAGES[name](c, value)
    return c
