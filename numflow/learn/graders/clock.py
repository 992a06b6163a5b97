"""Grader of a student's scheduler: simulated requests on a clock with a price per step and per token."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numflow.learn.cases.verdict import Verdict, Wrong, raised, right, wrong

STEP_S, TOKEN_S = 0.010, 0.0001  # seconds per step, and per token of a step
BLOCK, BUDGET, BLOCKS = 16, 256, 160
FASTER = 1.5  # required speed, relative to static batching
FEW = ((20, 9), (6, 30), (40, 4), (8, 6), (12, 22), (5, 12), (30, 5), (9, 14))  # requests of the chart
MANY = 100    # number of requests from which on changes to requests are not checked: small cases check them
# Small cases: name, requests (prompt tokens, tokens to generate), blocks, budget.
SMALL: tuple[tuple[str, list[tuple[int, int]], int, int], ...] = (
    ("one-request", [(5, 3)], 8, 32), ("a-long-prompt", [(100, 2)], 16, 32),
    ("two-requests", [(5, 4), (6, 2)], 8, 32), ("long-beside-short", [(5, 9), (90, 2), (4, 3)], 32, 16),
    ("little-memory", [(20, 20), (60, 20), (5, 5), (5, 5)], 6, 64),
    ("more-than-the-budget", [(4, 6)] * 12, 64, 8))


@dataclass(eq=False)
class LearnedRequest:
    """A request as `plan` gets it. written: tokens generated so far. wanted: tokens that it will generate."""

    number: int
    prompt: int
    blocks: int
    wanted: int
    written: int = 0


def grade_plan(plan: Callable) -> Verdict:
    """Grade on small cases, random cases, and by the speed for many requests."""
    cases = [*SMALL, *(_random(seed) for seed in range(25)), ("200-requests", _many(), BLOCKS, BUDGET)]
    for number, (name, requests, blocks, budget) in enumerate(cases, 1):
        try:
            seconds = run(plan, requests, blocks, budget)
        except Wrong as error:
            return wrong(name, number, len(cases), str(error), str(error))
        except Exception as error:
            return raised(name, number, len(cases), error)
        if name == "200-requests" and seconds > (least := run(static, requests, blocks, budget) / FASTER):
            return wrong(name, number, len(cases), f"{seconds:.2f} s, {least:.2f} s are allowed (static batching "
                         f"takes {least * FASTER:.2f} s)", f"{seconds:.6f}")
    return right(len(cases))


def static(waiting: list, running: list, free_blocks: int, budget: int) -> list:
    """Plan of static batching: the next requests start when all others have ended."""
    chosen = []
    for request in sorted(running, key=lambda request: request.prompt > 0):
        if tokens := min(request.prompt or 1, budget):
            chosen.append((request, tokens))
            budget -= tokens
    for request in [] if running else waiting:
        if request.blocks > free_blocks or budget <= 0:
            break
        chosen.append((request, min(request.prompt, budget)))
        budget, free_blocks = budget - chosen[-1][1], free_blocks - request.blocks
    return chosen


def run(plan: Callable, sizes: list[tuple[int, int]], blocks: int, budget: int,
        seen: Callable[[list, list], None] | None = None) -> float:
    """Simulate a plan; return the seconds on the clock until all requests have ended.

    seen: called for each step with the chosen requests (number, tokens, whether they are prompt tokens), and the
    numbers of all running requests.

    Raises:
        Wrong: a plan breaks a rule, or requests never end.
    """
    waiting = [LearnedRequest(number, prompt, -(-(prompt + wanted) // BLOCK), wanted)
               for number, (prompt, wanted) in enumerate(sizes)]
    running: list[LearnedRequest] = []
    work = sum(prompt + wanted for prompt, wanted in sizes)
    seconds, steps = 0.0, 0
    while waiting or running:
        free = blocks - sum(request.blocks for request in running)
        before = [(request, vars(request).copy()) for request in (*waiting, *running)] if len(sizes) < MANY else []
        lists = list(waiting), list(running)
        chosen = plan(*lists, free, budget)
        for name, original, now in zip(("waiting", "running"), lists, (waiting, running), strict=True):
            if original != now:
                raise Wrong(f"step {steps}: plan changes the list `{name}`; it must not change its arguments")
        for request, facts in before:
            if vars(request) != facts:
                raise Wrong(f"step {steps}: plan changes request {request.number}; it must not change its arguments")
        tokens = _check(chosen, waiting, running, free, budget, steps)
        if seen is not None:
            seen([(request.number, count, request.prompt > 0) for request, count in chosen],
                 [request.number for request in running])
        for request, count in chosen:
            if request in waiting:
                waiting.remove(request)
                running.append(request)
            if request.prompt:
                request.prompt -= count
                request.written += request.prompt == 0
            else:
                request.written += 1
        running = [request for request in running if request.written < request.wanted]
        seconds, steps = seconds + STEP_S + TOKEN_S * tokens, steps + 1
        if steps > 2 * work + 10:
            raise Wrong(f"after {steps} steps {len(waiting)} requests wait and {len(running)} run: a request starves")
    return seconds


def _check(chosen: Any, waiting: list, running: list, free: int, budget: int, step: int) -> int:
    """Check the rules of a plan; return its number of tokens."""
    if not isinstance(chosen, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in chosen):
        raise Wrong(f"step {step}: plan should return a list of (request, tokens), but returns {type(chosen).__name__}")
    if not chosen:
        raise Wrong(f"step {step}: the plan is empty, with {len(waiting)} waiting and {len(running)} running requests")
    seen: set[int] = set()
    for request, tokens in chosen:
        if request not in waiting and request not in running:
            raise Wrong(f"step {step}: {request!r} is neither a waiting nor a running request")
        if request.number in seen:
            raise Wrong(f"step {step}: request {request.number} is in the plan twice")
        seen.add(request.number)
        most = request.prompt or 1
        if not isinstance(tokens, int) or not 1 <= tokens <= most:
            needs = f"has {most} prompt tokens left" if request.prompt else "generates 1 token per step"
            raise Wrong(f"step {step}: request {request.number} {needs}, but the plan has {tokens}")
    total = sum(tokens for _, tokens in chosen)
    if total > budget:
        raise Wrong(f"step {step}: {total} tokens, but the budget is {budget}")
    starting = [request for request, _ in chosen if request in waiting]
    needed = sum(request.blocks for request in starting)
    if needed > free:
        raise Wrong(f"step {step}: the starting requests need {needed} blocks, but {free} are free")
    for first, request in zip(waiting, starting):
        if first not in starting:
            raise Wrong(f"step {step}: request {request.number} overtakes request {first.number}")
    return total


def _random(seed: int) -> tuple[str, list[tuple[int, int]], int, int]:
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 60), rng.randint(1, 20)) for _ in range(rng.randint(2, 12))]
    most = max(-(-(prompt + wanted) // BLOCK) for prompt, wanted in sizes)
    return f"random-{seed}", sizes, most + rng.randint(0, 10), rng.choice((8, 16, 64))


def _many() -> list[tuple[int, int]]:
    """200 requests with answers of very different lengths."""
    rng = random.Random(15)
    return [(rng.randint(10, 120), min(200, 2 + int(rng.expovariate(1 / 40)))) for _ in range(200)]


def plan_bars(plan: Callable, batches: Callable) -> dict[str, Any]:
    """Tokens per second for many requests, with static batching and with a plan, and charts of a few requests."""
    sizes = _many()
    tokens = sum(wanted for _, wanted in sizes)
    return {"what": "generated tokens per second, 200 requests on the simulated clock", "unit": "tokens/s",
            "bars": [(label, tokens / run(each, sizes, BLOCKS, BUDGET))
                     for label, each in (("static batching", batches), ("yours", plan))],
            "chart": ["eight requests, one row each, one column per step; ▒ prefill, █ decode, · waiting",
                      *(line for label, each in (("static batching", batches), ("yours", plan))
                        for line in (label, *gantt(each)))]}


def gantt(plan: Callable, sizes: tuple[tuple[int, int], ...] = FEW, blocks: int = 12, budget: int = 32) -> list[str]:
    """A chart of a few requests: a row of characters per request, a column per step."""
    rows: list[list[str]] = [[] for _ in sizes]
    steps = 0

    def seen(chosen, running):
        nonlocal steps
        for number, _, reads in chosen:
            rows[number] += " " * (steps - len(rows[number])) + ("▒" if reads else "█")
        for number in running:
            if number not in [each for each, *_ in chosen]:
                rows[number] += " " * (steps - len(rows[number])) + "·"
        steps += 1

    run(plan, list(sizes), blocks, budget, seen)
    return [f"{number + 1:3} {''.join(row)}" for number, row in enumerate(rows)]
