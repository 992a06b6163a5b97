"""Parameters for sampling on a device: the device picks the same token as `Sampler.pick`, from the logits alone.

A kernel reads WORDS 32-bit words per row: the temperature (f32; 0: greedy), the random number of the draw (in units of
2^-32), then (filter, value) for each filter in order, terminated by NONE. Values: MIN_P (f32: the logarithm of the
factor), TOP_K (a count), TOP_P (in units of 2^-32).
"""

import math
from collections.abc import Sequence
from struct import pack
from typing import NamedTuple

import numpy as np

from numflow.decoding.constraints import Constraints
from numflow.decoding.filters import divisor
from numflow.decoding.settings import FILTERS, Sampling
from numflow.decoding.weights import fraction
from numflow.errors import RequestError

FIRST = "temperature"
ON_DEVICE = ("min_p", "top_k", "top_p")  # filters that keep the leading candidates, and depend on the scores alone
MOST_TOKENS = 1 << 20  # maximum vocabulary for sampling on a device: sums of weights are exact up to it
NONE, MIN_P, TOP_K, TOP_P = range(4)
WORDS = 12
_HOST_ONLY = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "mirostat",
          "fsd", "pool_size", "eos_bypassing_max", "logprobs")  # settings that a device does not support


class Choice(NamedTuple):
    """Sampling parameters of one row of logits.

    temperature: divisor of the scores; 0: greedy (ties: the first), other parameters have no effect.
    uniform:     random number 0 .. 1 of the draw (select.draw).
    filters:     (name of ON_DEVICE, value) in order of application, after the temperature.
    later:       random numbers of the following steps of the same run (Program.decode); other parameters stay the same.
    """

    temperature: float = 0.0
    uniform: float = 0.0
    filters: tuple[tuple[str, float], ...] = ()
    later: tuple[float, ...] = ()


def plain_filters(settings: Sampling) -> tuple[tuple[str, float], ...] | None:
    """Filters of settings that a Choice can represent; None if it cannot."""
    if settings.given(*_HOST_ONLY):
        return None
    active = [name for name in settings.samplers if getattr(settings, name) not in (FILTERS[name], 0)]
    rest = [name for name in active if name != FIRST]
    if settings.greedy:
        return ()
    if not set(rest) <= set(ON_DEVICE) or (FIRST in active and active[0] != FIRST):
        return None
    return tuple((name, getattr(settings, name)) for name in rest)


def unconstrained(constraints: Constraints, new: int) -> bool:
    """Whether constraints allow every token after `new` new tokens, for any text."""
    c = constraints
    return not (c.no_repeat_ngram or c.banned or (c.ends and new < c.min_tokens)
                or (c.forced_last is not None and new + 1 == c.max_tokens))


def encode(choices: Sequence[Choice], rows: int | None = None) -> np.ndarray:
    """Encode the choices of rows for kernels, int32 [R, WORDS].

    Raises:
        RequestError: the number of choices is not `rows`.
    """
    if rows is not None and len(choices) != rows:
        raise RequestError(f"{rows} rows cannot be picked from by {len(choices)} choices")
    words = b"".join(_row(choice).ljust(4 * WORDS, b"\0") for choice in choices)
    return np.frombuffer(words, np.int32).reshape(-1, WORDS)


def draws(choices: Sequence[Choice], steps: int, most: int) -> np.ndarray:
    """Random numbers of rows for `steps` steps of one run, in units of 2^-32, uint32 [R, most]; 0 if unused.

    Raises:
        RequestError: a choice has too few random numbers.
    """
    found, steps = np.zeros((len(choices), most), np.uint32), min(steps, most)
    for row, choice in zip(found, choices):
        if choice.temperature:
            if len(choice.later) < steps - 1:
                raise RequestError(f"{steps} steps at once need as many random numbers, a choice has "
                                   f"{1 + len(choice.later)}")
            row[:steps] = [fraction(uniform) for uniform in (choice.uniform, *choice.later[:steps - 1])]
    return found


def _row(choice: Choice) -> bytes:
    temperature = divisor(choice.temperature) if choice.temperature else 0.0
    row = pack("<fI", temperature, fraction(choice.uniform))
    for name, value in choice.filters:
        if name == "min_p":
            row += pack("<If", MIN_P, math.log(value))
        else:
            row += pack("<II", *((TOP_P, fraction(value)) if name == "top_p" else
                                 (TOP_K, min(int(value), MOST_TOKENS))))
    return row
