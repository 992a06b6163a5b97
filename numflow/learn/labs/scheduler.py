"""Lab 15: a scheduler.

Many requests, one model. A step runs a batch: some requests read their prompts, others write a token each. A step costs
10 ms, whatever is in it, and 0.1 ms for each token: so a step should be full. Static batching waits until all
requests of a batch have ended before it starts the next; continuous batching (Orca) decides anew at every step.
`plan` decides.

    plan(waiting, running, free_blocks, budget) -> [(request, tokens), ...]

    waiting        requests that have not started, in the order in which they came
    running        requests that have started, in the order in which they did
    free_blocks    blocks of KV memory that nobody holds
    budget         tokens of a step, at most

A request has `prompt`, the tokens of its prompt that are still to be read, and `blocks`, what it holds from its start
to its end. The plan names each request at most once, with the tokens that it runs in this step:

    prompt > 0     1 .. prompt tokens of its prompt (a long prompt may be cut: chunked prefill)
    prompt == 0    just 1: it writes one

A waiting request that is named starts: its blocks must be free. Nobody overtakes: those that start are the first of
`waiting`. All must come to their end, and 200 requests must go through at 1.5 times the speed of static batching.
Requests must not be changed, and lists neither.

    numflow learn check 15       numflow learn hint 15       numflow learn bench 15
"""

LAB = {
    "number": 15, "title": "A scheduler", "minutes": 90, "functions": ["plan"], "grader": "own", "needs": [5],
    "hints": [
        "Draw time to the right and a row for each request: long bars read, short ones write. Where are the gaps in "
        "static batches of four?",
        "Those that write come first: they need one token each, and somebody waits for them to go on. What is left of "
        "the budget goes to prompts, of running requests first.",
        "left = budget; name every running request with prompt == 0 while left > 0; then running ones with min(prompt, "
        "left); then from the head of waiting while blocks and budget last, and stop at the first that does not fit."],
}


def plan(waiting, running, free_blocks, budget):
    """Requests that wait and run, blocks that are free, tokens of a step -> [(request, tokens), ...]."""
    return _plan(waiting, running, free_blocks, budget)


def _plan(waiting, running, free_blocks, budget, overtaking=False, order=1):
    chosen = []
    for request in sorted(running, key=lambda request: request.prompt > 0):  # those that write come first
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
    """static batches: requests start only when all others have ended"""
    return _plan([] if running else waiting, running, free_blocks, budget)


def plan__one_by_one(waiting, running, free_blocks, budget):
    """one request at a time"""
    return _plan([] if running else waiting[:1], running, free_blocks, budget)


def plan__no_budget(waiting, running, free_blocks, budget):
    """whole prompts, whatever the budget is: a long one is to be cut"""
    return [(request, request.prompt or 1) for request, _ in _plan(waiting, running, free_blocks, budget)]


def plan__never_cut(waiting, running, free_blocks, budget):
    """prompts that run whole or not at all: one longer than the budget never runs to its end"""
    return [(request, tokens) for request, tokens in _plan(waiting, running, free_blocks, budget)
            if tokens == (request.prompt or 1)]


def plan__in_place(waiting, running, free_blocks, budget):
    """requests that are taken out of `waiting`: a plan says what runs, and changes no list"""
    chosen = _plan(waiting, running, free_blocks, budget)
    waiting[:] = [request for request in waiting if request not in [started for started, _ in chosen]]
    return chosen


def plan__no_memory(waiting, running, free_blocks, budget):
    """requests that start though their blocks are not free"""
    return _plan(waiting, running, 10**9, budget)


def plan__overtaking(waiting, running, free_blocks, budget):
    """small requests that overtake one that waits for memory: it may wait for ever"""
    return _plan(waiting, running, free_blocks, budget, overtaking=True)


def plan__last_first(waiting, running, free_blocks, budget):
    """the last that came starting first"""
    return _plan(waiting, running, free_blocks, budget, order=-1)


def plan__two_tokens(waiting, running, free_blocks, budget):
    """two tokens of a request that writes: the second needs the first"""
    chosen = _plan(waiting, running, free_blocks, budget)
    return [(request, tokens if request.prompt else 2) for request, tokens in chosen]


def plan__writers_free(waiting, running, free_blocks, budget):
    """requests that write and do not count: each takes one token of the budget"""
    return plan(waiting, running, free_blocks, budget + sum(request.prompt == 0 for request in running))


def plan__forgotten(waiting, running, free_blocks, budget):
    """prompts that were begun and are forgotten: those that run go on reading"""
    chosen = plan(waiting, running, free_blocks, budget)
    return [(request, tokens) for request, tokens in chosen if request not in running or request.prompt == 0]


def plan__twice(waiting, running, free_blocks, budget):
    """a request that is named twice in one step"""
    chosen = plan(waiting, running, free_blocks, budget)
    return chosen + chosen[:1]


def plan__running_whole(waiting, running, free_blocks, budget):
    """prompts of running requests that are read to their end, whatever the budget is: a long one is cut again"""
    chosen = plan(waiting, running, free_blocks, budget)
    return [(request, request.prompt or tokens) if request in running else (request, tokens)
            for request, tokens in chosen]


def plan__nothing_left(waiting, running, free_blocks, budget):
    """requests that start with 0 tokens when the budget is used up: they start in the next step"""
    chosen = plan(waiting, running, free_blocks, budget)
    free = free_blocks - sum(request.blocks for request, _ in chosen if request in waiting)
    for request in waiting[sum(request in waiting for request, _ in chosen):]:
        if request.blocks > free or sum(tokens for _, tokens in chosen) < budget:
            break
        chosen.append((request, 0))
        free -= request.blocks
    return chosen


def grade(functions):
    """A few requests, then many."""
    from numflow.learn.graders.clock import grade_plan

    return grade_plan(functions["plan"])


def bench(functions):
    """Tokens a second of 200 requests."""
    from numflow.learn.graders.clock import plan_bars

    return plan_bars(functions["plan"], plan__static)
