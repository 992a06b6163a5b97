"""The result of a check: passed or not, and for a failure the case, the wrong element, its error and the cause."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np

from numflow.learn.cases.alike import alike

Functions = Mapping[str, Callable[..., Any]]


class Wrong(Exception):
    """A result that cannot be compared: None, a wrong shape or a wrong dtype."""


@dataclass
class Verdict:
    """The result of a check.

    case:     name of the first case that fails: case `number` of `of`. If all pass, both are the number of cases.
    message:  one line.
    place:    the first wrong element: run, row, column, got, expected, off, allowed, the number of wrong elements, and
              what they have in common.
    cause:    the sentence of a known mistake with the same wrong result.
    error:    the exception that the function raised.
    evidence: the function's result in that case, for a comparison with the results of known mistakes.
    """

    passed: bool
    message: str
    case: str = ""
    number: int = 0
    of: int = 0
    place: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    error: BaseException | None = None
    evidence: Any = None

    def facts(self) -> dict[str, Any]:
        """The verdict as JSON values; NaN and infinity are strings."""
        place = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                 for key, value in self.place.items()}
        return {"passed": self.passed, "message": self.message, "case": self.case, "number": self.number, "of": self.of,
                "place": place, "cause": self.cause}


def right(count: int, what: str = "cases") -> Verdict:
    """The verdict on a function that passes."""
    return Verdict(True, f"right: {count} {what} pass", number=count, of=count)


def wrong(case: str, number: int, of: int, said: str, evidence: Any = None, place: dict | None = None) -> Verdict:
    """The verdict on a function that fails in a case."""
    return Verdict(False, f"case {case} ({number} of {of}): {said}", case, number, of, place or {}, evidence=evidence)


def raised(case: str, number: int, of: int, error: BaseException) -> Verdict:
    """The verdict on a function that raises an exception."""
    message = " ".join(str(error).split()) or "(no message)"
    sentence = message if isinstance(error, Wrong) else f"{type(error).__name__}: {message}"
    verdict = wrong(case, number, of, sentence, (type(error).__name__, message))
    verdict.error = None if isinstance(error, Wrong) else error
    return verdict


def furthest(actual: np.ndarray, expected: np.ndarray, bound: float, heads: int = 0) -> dict[str, Any]:
    """The first element that differs by more than `bound` times the standard deviation of the expected array, and the
    number of such elements; {} if there are none. heads: name a column by its head and its column in the head.
    """
    scale = max(float(np.std(expected)), 1e-3)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(np.asarray(actual, np.float64) - expected)
    off = np.where(np.isfinite(off), off, np.inf)
    bad = off > bound * scale
    if not bad.any():
        return {}
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    rows = bad.reshape(len(bad), -1).any(axis=1)
    place: dict[str, Any] = {"row": int(index[0])}
    if bad.ndim > 1:
        place["column"] = int(index[-1])
    if heads and bad.ndim > 1:
        place["head"], place["place"] = divmod(int(index[-1]), bad.shape[1] // heads)
    values = {"got": float(actual[index]), "expected": float(expected[index]), "off": float(off[index]),
              "allowed": bound * scale}
    return place | values | {"wrong": int(bad.sum()), "numbers": bad.size, "wrong_rows": int(rows.sum()),
                             "rows": len(bad), "alike": alike(actual, expected, bad, heads)}


def described(place: Mapping[str, Any]) -> str:
    """The result of `furthest` in words."""
    where = f"row {place['row']}"
    if "head" in place:
        where += f", head {place['head']}, column {place['place']}"
    elif "column" in place:
        where += f", column {place['column']}"
    rows = f", in {place['wrong_rows']} of {place['rows']} rows" if "column" in place else ""
    return (f"{where}: got {place['got']:.6g}, expected {place['expected']:.6g}, off by {place['off']:.2g} (allowed "
            f"{place['allowed']:.1g}); {place['wrong']} of {place['numbers']} numbers are wrong{rows}"
            f"{'; ' if place['alike'] else ''}{place['alike']}")


def same(one: Any, other: Any, bound: float = 1e-5) -> bool:
    """Whether two pieces of evidence are equal: arrays up to `bound`, everything else exactly."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape:
            return False
        finite = other[np.isfinite(other)] if other.dtype.kind == "f" else other
        spread = max(float(np.std(finite)), 1e-3) if finite.size else 1.0
        return bool(np.allclose(one, other, rtol=bound, atol=bound * spread, equal_nan=True))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b, bound) for a, b in zip(one, other, strict=True))
    if is_dataclass(one) and type(one) is type(other):
        return same(list(vars(one).values()), list(vars(other).values()), bound)
    return type(one) is type(other) and bool(one == other)


def cause_of(verdict: Verdict, mistakes: list[tuple[str, str, Callable]], solution: Functions,
             grade: Callable[[Functions], Verdict]) -> str:
    """The sentence of the first mistake that fails in the same case with the same evidence; "" if there is none.

    mistakes: (name of the function, sentence, function with the mistake) each.
    """
    if verdict.evidence is None:
        return ""
    for name, sentence, function in mistakes:
        other = grade({**solution, name: function})
        if not other.passed and other.case == verdict.case and same(other.evidence, verdict.evidence):
            return sentence
    return ""
