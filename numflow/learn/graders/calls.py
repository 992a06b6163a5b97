"""Grader of single calls: functions, arguments and expected results."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numflow.learn.cases.verdict import Functions, Verdict, Wrong, described, furthest, raised, right, wrong


@dataclass(frozen=True)
class Call:
    """A case: a function, its arguments (arrays are copied for each call), and the expected result.

    expected: an array, a value, or a tuple of them. names: names of a tuple's parts. bound: allowed difference,
    relative to the standard deviation of the expected array; 0: none. judge: replaces `expected`; returns a message on
    what is wrong with a result, "" if nothing is.
    """

    name: str
    function: str
    arguments: tuple
    expected: Any = None
    names: tuple[str, ...] = ()
    bound: float = 0.0
    judge: Callable[[Any], str] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)


def grade_calls(functions: Functions, calls: Iterable[Call], given: Functions | None = None) -> Verdict:
    """Grade the functions on all calls, in order. given: functions of the calls that the student does not write."""
    calls, known = list(calls), {**(given or {}), **functions}
    for number, call in enumerate(calls, 1):
        try:
            with np.errstate(all="ignore"):
                arguments = [a.copy() if isinstance(a, np.ndarray) else a for a in call.arguments]
                found = known[call.function](*arguments, **call.keywords)
            said, place = (call.judge(found), {}) if call.judge else compared(call, found, call.expected)
        except Exception as error:
            return raised(call.name, number, len(calls), error)
        if said:
            return wrong(call.name, number, len(calls), f"{call.function}: {said}", found, place)
    return right(len(calls))


def compared(call: Call, found: Any, expected: Any, what: str = "") -> tuple[str, dict]:
    """(message, place) of the first wrong element of a result; ("", {}) if it is right."""
    part = f"{what}, " if what else ""
    if isinstance(expected, tuple):
        if not isinstance(found, tuple) or len(found) != len(expected):
            given = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
            raise Wrong(f"{call.function} should return {', '.join(call.names) or len(expected)}, but returns {given}")
        for index, (f, e) in enumerate(zip(found, expected, strict=True)):
            name = call.names[index] if call.names else f"value {index}"
            if (result := compared(call, f, e, name))[0]:
                return result
        return "", {}
    if not isinstance(expected, np.ndarray):
        return ("", {}) if _equal(found, expected, call.bound) else (f"{part}got {found!r}, expected {expected!r}", {})
    checked = array(found, expected, f"{call.function} returns {part or 'an array, '}")
    place = furthest(checked.reshape(len(checked), -1) if checked.ndim > 1 else checked,
                     expected.reshape(len(expected), -1) if expected.ndim > 1 else expected, call.bound)
    return (f"{part}{described(place)}", place | ({"array": what} if what else {})) if place else ("", {})


def array(found: Any, expected: np.ndarray, what: str) -> np.ndarray:
    """Check that a result is an array of the expected shape and kind of dtype, and return it.

    Raises:
        Wrong: it is not.
    """
    if found is None:
        raise Wrong(f"{what.partition(' ')[0]} returns nothing: is a return missing?")
    if not isinstance(found, np.ndarray):
        raise Wrong(f"{what}of type {type(found).__name__}, expected an array")
    if found.shape != expected.shape:
        raise Wrong(f"{what}of shape {list(found.shape)}, expected {list(expected.shape)}")
    kinds = "iu" if expected.dtype.kind in "iu" else expected.dtype.kind
    if found.dtype.kind not in kinds:
        raise Wrong(f"{what}of type {found.dtype}, expected {expected.dtype}")
    return found


def _equal(found: Any, expected: Any, bound: float) -> bool:
    if isinstance(expected, float) and isinstance(found, int | float | np.number):
        return abs(float(found) - expected) <= bound * max(abs(expected), 1.0)
    return bool(found == expected)
