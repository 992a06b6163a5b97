"""Grader of functions that replace ops of the reference executor: op cases, running in a model, and timing."""

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from numflow.learn.cases.build import Case, CaseBuilder, run_case
from numflow.learn.cases.cases import CASES
from numflow.learn.cases.verdict import Functions, Verdict, Wrong, described, furthest, raised, right, wrong
from numflow.ops import OPS
from numflow.reference import program

ROUNDS = 5  # repetitions of a measurement

_expected: dict[str, list[np.ndarray]] = {}  # outputs of the reference executor, by case


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade functions with the names of ops on the lab's cases."""
    return grade_cases(lab["cases"], lambda: installed(functions, lab), lab["parameters"])


def grade_cases(patterns: list[str], inside: Callable, parameters: Mapping[str, list[str]]) -> Verdict:
    """Grade on the cases that match `patterns`, in this order, which run within the context `inside()`.

    parameters: the parameters of each op that the lab teaches.
    """
    cases = chosen(patterns, parameters)
    for number, case in enumerate(cases, 1):
        expected = _truth(case)
        try:
            with inside(), np.errstate(all="ignore"):
                found = run_case(case, program.Program)
        except Exception as error:
            return raised(str(case), number, len(cases), error)
        heads = _heads(case, parameters)
        for run, (y, e) in enumerate(zip(found, expected, strict=True)):
            if place := furthest(y, e, case.bound, heads):
                return wrong(str(case), number, len(cases), f"run {run}, {described(place)}", found,
                             {"run": run, **place})
    return right(len(cases))


def chosen(patterns: list[str], parameters: Mapping[str, list[str]]) -> list[Case]:
    """Cases whose names match the patterns, in the order of the patterns, the smallest case of each pattern first.

    Cases that use other parameters of an op than `parameters` are left out: an op may get new parameters that the lab
    does not teach.
    """
    found: dict[str, Case] = {}
    for pattern in patterns:
        matching = [case for case in CASES if fnmatch.fnmatchcase(case.name, pattern)
                    and _fits(case, parameters)]
        found |= {case.name: case for case in sorted(matching, key=_size) if case.name not in found}
    return list(found.values())


KERNELS: dict[str, Callable] = program.KERNELS  # type: ignore[assignment]


@contextmanager
def installed(functions: Functions, lab: Mapping[str, Any], model: bool = False,
              checks: bool = True) -> Iterator[None]:
    """A context in which the functions replace the ops of the reference executor."""
    taught = lab.get("parameters", {})
    with replaced({op: adapted(op, functions[op], truth, model, taught.get(op), checks)
                   for op, truth in KERNELS.items() if op in functions}):
        yield


@contextmanager
def replaced(ops: Functions) -> Iterator[None]:
    """A context in which the functions replace the kernels of these ops in the reference executor."""
    before = {op: KERNELS[op] for op in ops}
    KERNELS.update(ops)
    try:
        yield
    finally:
        KERNELS.update(before)


def adapted(op: str, function: Callable, truth: Callable, model: bool = False,
            taught: list[str] | None = None, checks: bool = True) -> Callable:
    """Wrap `function` for the executor: inputs are read-only, and results must have the op's shape and kind of dtype.

    A parameter that the function does not have is not passed if it has the op's default. In a model, which may use more
    parameters than the lab teaches, `truth` runs the steps with other values.

    taught: the parameters that the lab teaches; None: the parameters in the function's signature. checks: whether to
    check results, for which `truth` runs too.
    """
    accepted: Any = inspect.signature(function).parameters if taught is None else taught
    accepts_all = taught is None and any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())

    def run(*inputs, **given):
        extra = {name for name in given if name not in accepted and not accepts_all}
        default = {name for name in extra if name in OPS[op].params and given[name] == OPS[op].params[name]}
        if model and extra - default:
            return truth(*inputs, **given)
        passed = {name: _read_only(value) for name, value in given.items() if name not in default}
        result = function(*map(_read_only, inputs), **passed)
        return _checked(op, result, truth(*inputs, **given)) if checks else result

    return run


def _checked(op: str, result: Any, expected: Any) -> Any:
    if isinstance(expected, tuple):
        if not isinstance(result, tuple) or len(result) != len(expected):
            found = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
            raise Wrong(f"{op} should return {len(expected)} arrays, but returns {found}")
        return tuple(_checked(op, r, e) for r, e in zip(result, expected, strict=True))
    if result is None:
        raise Wrong(f"{op} returns nothing: is a return missing?")
    if not isinstance(result, np.ndarray):
        raise Wrong(f"{op} should return an array, but returns {type(result).__name__}")
    if result.shape != expected.shape:
        raise Wrong(f"{op} returns the shape {list(result.shape)}, expected {list(expected.shape)}")
    kinds = "iu" if expected.dtype.kind in "iu" else "f"
    if result.dtype.kind not in kinds:
        raise Wrong(f"{op} returns an array of type {result.dtype}, expected {expected.dtype}")
    return result


def _read_only(value: Any) -> Any:
    """A read-only view: an input of this op may also be an input of another op."""
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _truth(case: Case) -> list[np.ndarray]:
    if case.name not in _expected:
        _expected[case.name] = run_case(case, program.Program)
    return _expected[case.name]


def _size(case: Case) -> int:
    """Number of elements of a case's buffers."""
    tokens = sum(count for parts in case.schedule for _, count in parts)
    return tokens * sum(buffer.width for buffer in case.network.buffers.values())


def _heads(case: Case, ops: Any) -> int:
    steps = [step for entry in case.network.entries.values() for step in entry if step.op in ops]
    return next((step.params["heads"] for step in steps if "heads" in step.params), 0)


def bars(functions: Functions, lab: Mapping[str, Any], build: Callable, tokens: int, moved: int = 0) -> dict[str, Any]:
    """Microseconds of the lab's ops for a number of tokens: by the student's functions and by numflow.

    build: adds the steps to a CaseBuilder and returns the output. moved: bytes that must be read or written once, if
    they exceed the caches; the time of a memory transfer of that size is a bar too.
    """
    from numflow.cpu.measure.roofline import measure_limits
    from numflow.cpu.program import Program as Compiled

    builder = CaseBuilder("bench")
    case = builder.case(build(builder), (((0, tokens),),))
    with installed(functions, lab, checks=False):
        yours = microseconds(case, program.Program, functions)
    found = [("yours", yours), ("numflow, NumPy", microseconds(case, program.Program, functions)),
             ("numflow, compiled", microseconds(case, Compiled, functions, threads=1, activations="f32"))]
    if moved:
        found.append((f"memory, {moved / 1e6:.0f} MB", moved / measure_limits(1, repeat=3).read_gb_s / 1e3))
    return {"what": f"{tokens} tokens, one thread", "unit": "µs", "bars": found}


def microseconds(case: Case, program_class: Any, ops: Any, **options: Any) -> float:
    """Time of the steps with these ops in a case: the minimum of ROUNDS rounds, after one warm-up."""
    running = program_class(case.network, case.weights, **options)
    try:
        running.reserve(case.blocks(running.block_size))
        totals = []
        for _ in range(ROUNDS + 1):
            rows = [row for run in case.runs(running.block_size) for row in running.trace(run.batch, run.entry)]
            totals.append(sum(row.microseconds for row in rows if row.op in ops))
        return min(totals[1:])
    finally:
        running.close()


def _fits(case: Case, parameters: Mapping[str, list[str]]) -> bool:
    return all({*step.weights, *step.params} <= {*parameters[step.op]}
               for entry in case.network.entries.values() for step in entry if step.op in parameters)
