"""Grader of functions that split matrices and sum over devices: single calls, then plans of several devices."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from numflow.errors import DeviceError
from numflow.learn.cases.build import CaseBuilder, run_case
from numflow.learn.cases.verdict import Functions, Verdict, Wrong, described, furthest, raised, right, wrong
from numflow.learn.graders.calls import Call, array, grade_calls
from numflow.network import WeightSource
from numflow.partition.cut.cut import partition
from numflow.partition.run.program import PlanProgram
from numflow.reference import program

WAIT = 2.0  # seconds after which waiting devices are considered deadlocked
# Cases of sums: name, group, devices with a term in the order of the sum.
SUMS = (("two-devices", (0, 1), (0, 1)), ("three-in-another-order", (0, 1, 2), (2, 0, 1)),
        ("one-without-a-term", (0, 1, 2), (1, 2)), ("numbers-that-are-no-places", (3, 5), (5, 3)))
PLANS = ("0&1", "0&1&2", "0&1&2&3")


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade the splits, then sums with a thread per device, then a feed-forward layer run by plans."""
    cuts = _cuts()
    of = len(cuts) + len(SUMS) + len(PLANS)
    verdict = grade_calls(functions, cuts)
    verdict.of = of
    if not verdict.passed:
        return verdict
    for number, (name, group, adds) in enumerate(SUMS, len(cuts) + 1):
        try:
            said, evidence = _sum(functions["all_reduce"], group, adds)
        except Exception as error:
            return raised(name, number, of, error)
        if said:
            return wrong(name, number, of, said, evidence)
    for number, devices in enumerate(PLANS, len(cuts) + len(SUMS) + 1):
        try:
            with installed(functions, lab):
                found, expected = _plan(devices)
        except Exception as error:
            return raised(f"plan {devices}", number, of, error)
        if place := furthest(found, expected, 1e-5):
            return wrong(f"plan {devices}", number, of, described(place), [found], place)
    return right(of)


@contextmanager
def installed(functions: Functions, lab: Mapping[str, Any], model: bool = False) -> Iterator[None]:
    """A context in which devices of the reference executor sum with the student's `all_reduce`."""
    truth = program.BETWEEN_DEVICES["all_reduce"]
    program.BETWEEN_DEVICES["all_reduce"] = functions["all_reduce"]
    try:
        yield
    finally:
        program.BETWEEN_DEVICES["all_reduce"] = truth


def sent(all_reduce: Callable) -> float:
    """Megabytes that four devices send to other devices for an all_reduce of float32 [64, 4096]."""
    counted = []

    class Counting(program.World):
        def put(self, sender, receiver, x):
            counted.append(x.nbytes * (sender != receiver))
            super().put(sender, receiver, x)

    group = (0, 1, 2, 3)
    terms = {device: np.ones((64, 4096), np.float32) for device in group}
    found, _ = _devices(all_reduce, terms, group, group, Counting)
    if len(found) < len(group):
        raise DeviceError("deadlock: the devices wait for each other")
    return sum(counted) / 1e6


def _cuts() -> list[Call]:
    w = np.arange(48, dtype=np.float32).reshape(6, 8)
    rows = [Call(f"column-parallel-{n}-{i}", "column_parallel", (w, n, i), w[i * 6 // n:(i + 1) * 6 // n])
            for n, i in ((2, 0), (2, 1), (3, 1), (1, 0))]
    return rows + [Call(f"row-parallel-{n}-{i}", "row_parallel", (w, n, i), w[:, i * 8 // n:(i + 1) * 8 // n])
                   for n, i in ((2, 0), (2, 1), (4, 2), (1, 0))]


def _sum(all_reduce: Callable, group: tuple, adds: tuple) -> tuple[str, Any]:
    """(message, evidence) of one case of all_reduce; the message is "" if the sum is right."""
    rng = np.random.default_rng(len(group))
    terms = {device: (rng.standard_normal((3, 4)) * 10.0 ** rng.integers(-3, 4, (3, 4))).astype(np.float32)
             for device in adds}
    expected = terms[adds[0]]
    for device in adds[1:]:
        expected = expected + terms[device]
    found, errors = _devices(all_reduce, terms, group, adds)
    for device in group:
        if isinstance(errors.get(device), BaseException):
            raise errors[device]
        if device not in found:
            return f"device {device} waits for ever", f"waits {sorted(set(group) - set(found))}"
    evidence = [found[device] for device in group]
    for device in group:
        if found[device] is None:
            return (f"all_reduce returns nothing on device {device}, which has {'a' if device in adds else 'no'} term; "
                    "all devices of the group get the sum"), evidence
        y = array(found[device], expected, f"all_reduce returns on device {device} a value ")
        if place := furthest(y, expected, 1e-5):
            return f"device {device} of {list(group)}, {described(place)}", evidence
    for device in group:
        if not np.array_equal(found[device], expected):
            return f"on device {device} the last bits differ from the sum in the order {list(adds)}", [
                e.tobytes() for e in evidence]
    return "", None


def _devices(all_reduce: Callable, terms: Mapping[int, np.ndarray], group: tuple, adds: tuple,
             kind: Callable = program.World) -> tuple[dict, dict[int, Any]]:
    """Run a thread per device; return results and exceptions by device. A device that waits too long has neither."""
    class Watching(kind):  # type: ignore[misc, valid-type]
        def put(self, sender, receiver, x):
            if isinstance(x, np.ndarray) and np.shares_memory(x, given[sender]):
                raise Wrong(f"device {sender} puts x itself, not a copy: the engine overwrites x as soon as "
                            "all_reduce returns, perhaps before other devices have taken it")
            handed[sender].append((x, np.copy(x)))
            super().put(sender, receiver, x)

    handed: dict[int, list] = {device: [] for device in group}
    world = Watching(dict.fromkeys(group))
    given = {device: terms[device].copy() for device in terms}
    found: dict[int, Any] = {}
    errors: dict[int, Any] = {}

    def run(device):
        try:
            found[device] = all_reduce(given.get(device), world=world, device=device, group=group, adds=adds)
            if not all(np.array_equal(x, was) for x, was in handed[device]):
                raise Wrong(f"device {device} changes an array after it has put it, perhaps before others take it")
        except DeviceError as error:  # the device waited until world.abort()
            errors[device] = str(error)
        except Exception as error:
            errors[device] = error

    threads = [threading.Thread(target=run, args=(device,), daemon=True) for device in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT if thread is threads[0] else WAIT / 10)
    world.abort()
    for thread in threads:
        thread.join(WAIT)
    return found, errors


def _plan(devices: str) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of a feed-forward layer on several devices and on one device."""
    b = CaseBuilder("feed-forward")
    (x,) = b.inputs(24)
    h, y = b.buffer(48), b.buffer(24)
    b.step("linear", (x,), (h,), {"weight": b.weight("up", b.normal(48, 24))})
    b.step("act", (h,), (h,), kind="silu")
    b.step("linear", (h,), (y,), {"weight": b.weight("down", b.normal(24, 48))})
    case = b.case(y)
    constants = {name: replace(weight, constant=b.arrays[name]) for name, weight in case.network.weights.items()}
    plan = partition(replace(case.network, weights=constants), devices, "reference")

    def on_devices(network, weights):
        return PlanProgram(plan, program, lambda own: WeightSource(own, None), timeout=WAIT)

    (found,), (expected,) = run_case(case, on_devices), run_case(case, program.Program)
    if not isinstance(found, np.ndarray):
        raise Wrong("the plan has no output")
    return found, expected
