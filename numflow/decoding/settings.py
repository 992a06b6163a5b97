"""Sampling parameters of one request: a checked record for all strategies."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from numflow.errors import RequestError, did_you_mean, option, quoted

# The filters in the order in which they are applied, unless `samplers` says otherwise -> the value that does nothing.
FILTERS = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "tfs_z": 1.0, "typical_p": 1.0, "top_p": 1.0}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; docs/decoding.md has the formulas and their sources.

    temperature:      0 is greedy; else scores are divided by it.
    top_k:            draw from the k most probable tokens (0: all). top_p: from the fewest that hold this probability.
    min_p:            drop tokens less probable than min_p times the best one.
    tfs_z, typical_p: tail-free and locally typical sampling; 1: off.
    samplers:         the order of temperature and filters; a filter that is left out cannot be used.
    pool_size:        only so many of the best tokens are looked at (before the temperature); 0: all.
    mirostat:         1 or 2: its version, in place of the filters. mirostat_tau: surprise aimed at, in bits;
                      mirostat_eta: how fast its limit is corrected.
    fsd:              True: frustratingly simple decoding: of the fsd_k best, the token that is probable and does not
                      follow from the text's own n-grams of up to fsd_n tokens, weighed by fsd_alpha; fsd_beta is what
                      longer ones take of the weight left. "random": for the first fsd_random tokens a coin decides
                      between this and drawing.
    repetition_penalty, presence_penalty, frequency_penalty: lower the scores of tokens that came: a factor for prompt
                      and new tokens, a sum once and a sum per occurrence for new ones.
    repeat_last_n:    the penalties look at so many tokens; -1: all.
    dry_multiplier:   above 0: lower tokens that lengthen a repetition of dry_allowed_length tokens or more, by
                      dry_multiplier * dry_base ** (length - dry_allowed_length); dry_breakers: ids that end one.
    logit_bias:       token id -> what is added to its score.
    eos_bypassing_max: so many times the best other token comes in place of an end token.
    seed:             None draws different tokens each time.
    logprobs:         also tell the log-probability of each token and of the N most probable ones; None: do not.

    Raises:
        RequestError: a value out of range, or one that contradicts another or has no effect beside it.
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
        for reason in idle(vars(self)).values():
            raise RequestError(reason)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken."""
        return self.temperature == 0 and not self.fsd

    @property
    def deterministic(self) -> bool:
        """Whether no token is drawn at random."""
        return self.temperature == 0 or self.fsd is True

    def given(self, *names: str) -> list[str]:
        """Those of the names whose values are not the defaults."""
        return [name for name in names if getattr(self, name) != DEFAULTS[name]]


def check(values: Mapping[str, Any]) -> None:
    """Every setting for itself, and strategies that rule each other out. values: all settings.

    Raises:
        RequestError: a value out of range, or two strategies.
    """
    for name, (good, wanted) in _RULES.items():
        if not good(values[name]):
            raise RequestError(f"{option(name)} should be {wanted}, is {quoted(values[name])}")
    samplers = values["samplers"]
    for at, name in enumerate(samplers):
        if name not in FILTERS:
            raise RequestError(f"samplers has {quoted(name)}, which is none{did_you_mean(name, FILTERS)}")
        if name in samplers[:at]:
            raise RequestError(f"samplers names one twice: {name}")
    if values["fsd"] and values["mirostat"]:
        raise RequestError(f"mirostat={values['mirostat']} contradicts fsd={quoted(values['fsd'])}: leave out one of "
                           "them")
    if values["fsd"] == "random" and values["temperature"] == 0:
        raise RequestError('fsd="random" draws tokens: give a temperature above 0')


def idle(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings that have no effect beside the others -> why. values: all settings, in range."""
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

# Settings of which one is needed -> settings that do nothing without.
_NEED = {
    ("mirostat",): ("mirostat_tau", "mirostat_eta"),
    ("fsd",): ("fsd_k", "fsd_n", "fsd_alpha", "fsd_beta"),
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"): ("repeat_last_n",),
    ("dry_multiplier",): ("dry_base", "dry_allowed_length", "dry_breakers"),
}


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number from `least`."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def checked_count(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """A whole number from `least`, to `most` where that is given.

    Raises:
        RequestError: the value of the setting `name` is none.
    """
    if not is_count(value, least) or (most is not None and value > most):
        wanted = f"from {least}" if most is None else f"{least} .. {most}"
        raise RequestError(f"{option(name)} should be a whole number {wanted}, is {quoted(value)}")
    return int(value)


def _numbers(text: str, good: Callable[[float], bool] = lambda value: True) -> tuple:
    return (lambda value: is_number(value) and good(value)), text


def _counts(least: int, text: str = "") -> tuple:
    return (lambda value: is_count(value, least)), text or f"a whole number from {least}"


_SHARE = _numbers("above 0 and at most 1", lambda value: 0 < value <= 1)
_WEIGHT = _numbers("a number 0 .. 1", lambda value: 0 <= value <= 1)
_FROM_ZERO = _numbers("a number from 0", lambda value: value >= 0)
_POSITIVE = _numbers("a number above 0", lambda value: value > 0)
_SEED = _counts(0)

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": _FROM_ZERO, "top_k": _counts(0), "top_p": _SHARE, "tfs_z": _SHARE, "typical_p": _SHARE,
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
