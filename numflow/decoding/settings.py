"""Sampling parameters of one request: one checked record for all strategies."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from numflow.errors import RequestError, did_you_mean, option, quoted

# Filters in their default order of application (`samplers` changes it) -> the value that switches the filter off.
FILTERS = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "tfs_z": 1.0, "typical_p": 1.0, "top_p": 1.0}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; docs/decoding.md has the formulas and their sources.

    temperature:      divisor of the scores; 0: greedy.
    top_k:            sample from the k most probable tokens (0: all). top_p: sample from the smallest set of most
                      probable tokens whose probabilities sum to top_p.
    min_p:            drop tokens less probable than min_p times the probability of the best token.
    tfs_z, typical_p: tail-free and locally typical sampling; 1: off.
    samplers:         order of temperature and filters; a filter that is not listed cannot be used.
    pool_size:        keep only this many of the best tokens, before the temperature; 0: all.
    mirostat:         version of Mirostat, 1 or 2, instead of the filters; 0: off. mirostat_tau: target surprise in
                      bits.
                      mirostat_eta: learning rate of the surprise limit.
    fsd:              True: frustratingly simple decoding: of the fsd_k best tokens, the one with the largest
                      (1 - fsd_alpha) probability - fsd_alpha penalty; the penalty comes from the text's n-grams of up
                      to fsd_n tokens, smoothed by fsd_beta. "random": for each of the first fsd_random tokens, a random
                      number chooses between this and sampling.
    repetition_penalty, presence_penalty, frequency_penalty: lower the scores of tokens in the text: a factor for prompt
                      and new tokens; a constant for new tokens; a constant per occurrence for new tokens.
    repeat_last_n:    number of latest tokens that the penalties consider; -1: all.
    dry_multiplier:   above 0: lower the scores of tokens that continue a repetition of dry_allowed_length or more
                      tokens by dry_multiplier * dry_base ** (length - dry_allowed_length). dry_breakers: ids that end a
                      repetition.
    logit_bias:       token id -> value added to its score.
    eos_bypassing_max: number of times that the best other token replaces an end token.
    seed:             seed of the random numbers; None: a new random seed.
    logprobs:         also return the log-probability of each token and of the N most probable tokens; None: do not.

    Raises:
        RequestError: a value out of range, or a value that contradicts another or has no effect in combination with it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    tfs_z: float = 1.0
    typical_p: float = 1.0
    samplers: tuple[str, ...] = tuple(FILTERS)
    pool_size: int = 0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    fsd: bool | str = False
    fsd_k: int = 6
    fsd_n: int = 3
    fsd_alpha: float = 0.5
    fsd_beta: float = 0.9
    fsd_random: int = 10
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    eos_bypassing_max: int = 0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self):
        check(vars(self))
        for reason in without_effect(vars(self)).values():
            raise RequestError(reason)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature == 0 and not self.fsd

    @property
    def deterministic(self) -> bool:
        """Whether no token is sampled at random."""
        return self.temperature == 0 or self.fsd is True

    def given(self, *names: str) -> list[str]:
        """Those `names` whose values differ from the defaults."""
        return [name for name in names if getattr(self, name) != DEFAULTS[name]]


def check(values: Mapping[str, Any]) -> None:
    """Check the range of every setting, and that strategies are not combined. values: all settings.

    Raises:
        RequestError: a value out of range, or two strategies.
    """
    for name, (good, wanted) in _RULES.items():
        if not good(values[name]):
            raise RequestError(f"{option(name)} should be {wanted}, is {quoted(values[name])}")
    samplers = values["samplers"]
    for index, name in enumerate(samplers):
        if name not in FILTERS:
            raise RequestError(f"samplers has {quoted(name)}, which is none{did_you_mean(name, FILTERS)}")
        if name in samplers[:index]:
            raise RequestError(f"samplers names one twice: {name}")
    if values["fsd"] and values["mirostat"]:
        raise RequestError(f"mirostat={values['mirostat']} contradicts fsd={quoted(values['fsd'])}: leave out one of "
                           "them")
    if values["fsd"] == "random" and values["temperature"] == 0:
        raise RequestError('fsd="random" draws tokens: give a temperature above 0')


def without_effect(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings that have no effect in combination with the others -> reason. values: all settings, in range."""
    found: dict[str, str] = {}

    def given(names) -> list[str]:
        return [name for name in names if values[name] != DEFAULTS[name]]

    def add(names, reason: str) -> None:
        found.update({name: f"{name}={values[name]} {reason}" for name in given(names) if name not in found})

    greedy, filters = values["temperature"] == 0 and not values["fsd"], [n for n in FILTERS if n != "temperature"]
    if greedy:
        add([name for name in filters if (name, values[name]) != ("top_k", 1)] + ["mirostat", "pool_size"],
            "has no effect at temperature 0, which is greedy; give a temperature above 0")
    elif values["fsd"] is True:
        add(filters, "has no effect beside fsd=True, which draws nothing")
    elif values["mirostat"]:
        add(filters, f"has no effect beside mirostat={values['mirostat']}, which decides how many tokens to keep")
    add([name for name in FILTERS if name not in values["samplers"] and values[name] != FILTERS[name]],
        "has no effect: samplers leaves it out")
    for wanted, names in _NEED.items():
        if not [name for name in given(wanted) if name not in found]:
            add(names, f"has no effect without {' or '.join(wanted)}")
    if values["fsd"] != "random":
        add(["fsd_random"], 'has no effect without fsd="random"')
    return found


DEFAULTS: dict[str, Any] = {f.name: {} if f.name == "logit_bias" else f.default for f in fields(Sampling)}

# Settings, one of which must be active -> settings that have no effect otherwise.
_NEED = {
    ("mirostat",): ("mirostat_tau", "mirostat_eta"),
    ("fsd",): ("fsd_k", "fsd_n", "fsd_alpha", "fsd_beta"),
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"): ("repeat_last_n",),
    ("dry_multiplier",): ("dry_base", "dry_allowed_length", "dry_breakers"),
}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number >= `least`."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def checked_count(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Check a whole number >= `least`, and <= `most` if given. Returns it as int.

    Raises:
        RequestError: the value of the setting `name` is not such a number.
    """
    if not is_count(value, least) or (most is not None and value > most):
        wanted = f"from {least}" if most is None else f"{least} .. {most}"
        raise RequestError(f"{option(name)} should be a whole number {wanted}, is {quoted(value)}")
    return int(value)


def _numbers(text: str, good: Callable[[float], bool] = lambda value: True) -> tuple:
    return (lambda value: is_number(value) and good(value)), text


def _counts(least: int, text: str = "") -> tuple:
    return (lambda value: is_count(value, least)), text or f"a whole number from {least}"


_PROBABILITY = _numbers("above 0 and at most 1", lambda value: 0 < value <= 1)
_WEIGHT = _numbers("a number 0 .. 1", lambda value: 0 <= value <= 1)
_FROM_ZERO = _numbers("a number from 0", lambda value: value >= 0)
_POSITIVE = _numbers("a number above 0", lambda value: value > 0)
_SEED = _counts(0)

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": _FROM_ZERO, "top_k": _counts(0),
    "top_p": _PROBABILITY, "tfs_z": _PROBABILITY, "typical_p": _PROBABILITY,
    "min_p": _numbers("at least 0 and below 1", lambda value: 0 <= value < 1),
    "samplers": (lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
                 "a list of names"),
    "pool_size": _counts(0),
    "mirostat": (lambda value: is_count(value) and value <= 2, "0 (off), 1 or 2"),
    "mirostat_tau": _POSITIVE, "mirostat_eta": _POSITIVE,
    "fsd": (lambda value: isinstance(value, bool) or value == "random", 'True, False or "random"'),
    "fsd_k": _counts(1), "fsd_n": _counts(1), "fsd_alpha": _WEIGHT, "fsd_beta": _WEIGHT, "fsd_random": _counts(0),
    "repetition_penalty": _POSITIVE,
    "presence_penalty": _numbers("a number"), "frequency_penalty": _numbers("a number"),
    "repeat_last_n": _counts(-1, "a whole number from 0, or -1 for all"),
    "dry_multiplier": _FROM_ZERO, "dry_base": _numbers("a number from 1", lambda value: value >= 1),
    "dry_allowed_length": _counts(1),
    "dry_breakers": (lambda value: isinstance(value, frozenset) and all(map(is_count, value)), "a set of token ids"),
    "logit_bias": (lambda value: isinstance(value, Mapping) and all(map(is_count, value))
                   and all(map(is_number, value.values())), "a map of token ids to numbers"),
    "eos_bypassing_max": _counts(0),
    "seed": (lambda value: value is None or is_count(value), _SEED[1]),
    "logprobs": (lambda value: value is None or is_count(value), _SEED[1]),
}
