"""Parameters with which a device picks the token that `Sampler.pick` would, where logits alone decide."""

from typing import NamedTuple

from numflow.decoding.constraints import Constraints
from numflow.decoding.settings import FILTERS, Sampling

FIRST = "temperature"
ON_DEVICE = ("min_p", "top_k", "top_p")  # filters that leave the leading candidates, and need no more than scores
_ALONE = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "mirostat",
          "fsd", "pool_size", "eos_bypassing_max", "logprobs")  # settings that a device does not have


class Choice(NamedTuple):
    """Parameters of one draw from a row of logits.

    temperature: scores are divided by it; 0: the largest is taken, the first of equals, and nothing else counts.
    uniform:     the random number 0 .. 1 of the draw (select.draw).
    filters:     (name of ON_DEVICE, value) in the order in which they are applied, after the temperature.
    """

    temperature: float = 0.0
    uniform: float = 0.0
    filters: tuple[tuple[str, float], ...] = ()


def plain_filters(settings: Sampling) -> tuple[tuple[str, float], ...] | None:
    """The filters of settings that ask for no more than a Choice holds; None if they do."""
    if settings.given(*_ALONE):
        return None
    active = [name for name in settings.samplers if getattr(settings, name) not in (FILTERS[name], 0)]
    rest = [name for name in active if name != FIRST]
    if settings.greedy:
        return ()
    if not set(rest) <= set(ON_DEVICE) or (FIRST in active and active[0] != FIRST):
        return None
    return tuple((name, getattr(settings, name)) for name in rest)


def unconstrained(constraints: Constraints, new: int) -> bool:
    """Whether every token may come next, whatever the text, after `new` new ones."""
    c = constraints
    return not (c.no_repeat_ngram or c.banned or (c.ends and new < c.min_tokens)
                or (c.forced_last is not None and new + 1 == c.max_tokens))
