"""Lab 15: a scheduler.

Many requests share one model. In each step the model runs a batch: some requests process their prompts (prefill),
others generate one token each (decode). A step takes 10 ms plus 0.1 ms per token, so it should be as full as possible.
Static batching starts the next batch when all requests of the batch before have ended. Continuous batching (Orca) forms
a new batch in every step. `plan` forms this batch.

    plan(waiting, running, free_blocks, budget) -> [(request, tokens), ...]

    waiting        requests that have not started, in order of arrival
    running        requests that have started, in order of their start
    free_blocks    number of free KV blocks
    budget         largest number of tokens of a step

A request has `prompt`, the number of prompt tokens that are not processed yet, and `blocks`, the number of KV blocks
that it holds from its start to its end. The plan contains each request at most once, with its tokens in this step:

    prompt > 0     1 .. prompt tokens of its prompt (a long prompt may be split: chunked prefill)
    prompt == 0    1: the request generates one token

A waiting request starts when it is in the plan. Then its blocks must be free. No request overtakes another: those that
start are the first ones of `waiting`. All requests must finish, and 200 requests must run at least 1.5 times as fast as
with static batching. Change neither the requests nor the lists.

    numflow learn check 15       numflow learn hint 15       numflow learn bench 15
"""

LAB = {
    "number": 15, "title": "A scheduler", "minutes": 90, "functions": ["plan"], "grader": "own", "needs": [5],
    "hints": [
        "Draw time to the right and a row for each request: a long bar for prefill, a short bar for each decode step. "
        "Where are the gaps with static batches of four?",
        "Requests that decode come first: they need one token each, and a user waits for every token. The rest of the "
        "budget goes to prompts, first to those of running requests.",
        "left = budget; take every running request with prompt == 0 while left > 0; then the other running ones with "
        "min(prompt, left); then waiting ones in order while blocks and budget last: stop at the first misfit."],
}


def plan(waiting, running, free_blocks, budget):
    """Waiting and running requests, number of free blocks, tokens per step -> [(request, tokens), ...]."""
    return _plan(waiting, running, free_blocks, budget)


def _plan(waiting, running, free_blocks, budget, overtaking=False, order=1):
    chosen = []
    for request in sorted(running, key=lambda request: request.prompt > 0):  # requests that decode come first
        tokens = min(request.prompt or 1, budget)
        if tokens:
            chosen.append((request, tokens))
            budget -= tokens
    for request in waiting[::order]:
        if budget <= 0:
            break
        if request.blocks > free_blocks:
            if overtaking:
                continue
            break
        tokens = min(request.prompt, budget)
        chosen.append((request, tokens))
        budget, free_blocks = budget - tokens, free_blocks - request.blocks
    return chosen


def plan__static(waiting, running, free_blocks, budget):
    """static batching: requests start only when all others have ended"""
    return _plan([] if running else waiting, running, free_blocks, budget)


def plan__one_by_one(waiting, running, free_blocks, budget):
    """one request at a time"""
    return _plan([] if running else waiting[:1], running, free_blocks, budget)


def plan__no_budget(waiting, running, free_blocks, budget):
    """whole prompts, which ignores the budget: split a long prompt"""
    return [(request, request.prompt or 1) for request, _ in _plan(waiting, running, free_blocks, budget)]


def plan__never_cut(waiting, running, free_blocks, budget):
    """prompts that are never split: a prompt longer than the budget never runs"""
    return [(request, tokens) for request, tokens in _plan(waiting, running, free_blocks, budget)
            if tokens == (request.prompt or 1)]


def plan__in_place(waiting, running, free_blocks, budget):
    """requests that are removed from `waiting`: do not change the lists"""
    chosen = _plan(waiting, running, free_blocks, budget)
    waiting[:] = [request for request in waiting if request not in [started for started, _ in chosen]]
    return chosen


def plan__no_memory(waiting, running, free_blocks, budget):
    """requests that start although not enough blocks are free"""
    return _plan(waiting, running, 10**9, budget)


def plan__overtaking(waiting, running, free_blocks, budget):
    """small requests that overtake a request that waits for memory, which may then wait for ever"""
    return _plan(waiting, running, free_blocks, budget, overtaking=True)


def plan__last_first(waiting, running, free_blocks, budget):
    """the last arrived request that starts first"""
    return _plan(waiting, running, free_blocks, budget, order=-1)


def plan__two_tokens(waiting, running, free_blocks, budget):
    """two tokens of a request that decodes: the second token depends on the first"""
    chosen = _plan(waiting, running, free_blocks, budget)
    return [(request, tokens if request.prompt else 2) for request, tokens in chosen]


def plan__writers_free(waiting, running, free_blocks, budget):
    """requests that decode without counting: each takes one token of the budget"""
    return plan(waiting, running, free_blocks, budget + sum(request.prompt == 0 for request in running))


def plan__forgotten(waiting, running, free_blocks, budget):
    """running requests whose prompts are not continued"""
    chosen = plan(waiting, running, free_blocks, budget)
    return [(request, tokens) for request, tokens in chosen if request not in running or request.prompt == 0]


def plan__twice(waiting, running, free_blocks, budget):
    """a request that is in the plan twice"""
    chosen = plan(waiting, running, free_blocks, budget)
    return chosen + chosen[:1]


def plan__running_whole(waiting, running, free_blocks, budget):
    """whole rests of the prompts of running requests, which ignores the budget: split a long prompt again"""
    chosen = plan(waiting, running, free_blocks, budget)
    return [(request, request.prompt or tokens) if request in running else (request, tokens)
            for request, tokens in chosen]


def plan__nothing_left(waiting, running, free_blocks, budget):
    """requests that start with 0 tokens when the budget is used up: start them in the next step"""
    chosen = plan(waiting, running, free_blocks, budget)
    free = free_blocks - sum(request.blocks for request, _ in chosen if request in waiting)
    for request in waiting[sum(request in waiting for request, _ in chosen):]:
        if request.blocks > free or sum(tokens for _, tokens in chosen) < budget:
            break
        chosen.append((request, 0))
        free -= request.blocks
    return chosen


def grade(functions):
    """Grade with a few requests, then with many."""
    from numflow.learn.graders.clock import grade_plan

    return grade_plan(functions["plan"])


def bench(functions):
    """Tokens per second of 200 requests."""
    from numflow.learn.graders.clock import plan_bars

    return plan_bars(functions["plan"], plan__static)
