"""Requests: the schedule of the same twelve requests with static and with continuous batching.

All requests arrive at once and have different numbers of tokens to write. A step runs the model once for all requests
in the batch and gives each of them one token. In a static (fixed) batch, the slot of a finished request stays empty
until the longest request has ended. In a continuous (running) batch, the next request gets the slot at the next step.
The report counts steps, not seconds, so it is the same on every machine.
"""

import numpy as np

from numflow.lab import style

OPTIONS = {"model": "tiny", "requests": 12, "places": 4, "longest": 64}
WAYS = ("static", "dynamic")
PROMPT = "Kim had two plums."


def run(lab):
    import numflow

    if lab.quick:
        lab.options |= {"requests": 5, "places": 2, "longest": 8}
    options = lab.options
    rng = np.random.default_rng(3)
    lengths = np.exp(rng.normal(np.log(options["longest"] / 3), 0.7, options["requests"]))
    lengths = lengths.clip(3, options["longest"]).astype(int).tolist()
    with numflow.load(options["model"], threads=1) as model:
        found = {way: spans(numflow, model, lengths, options["places"], way) for way in WAYS}
    lab.results |= {"lengths": lengths, "spans": found}
    lab.text(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    total = {way: 1 + max(last for _, last in own) for way, own in found.items()}
    busy = {way: sum(lengths) / (options["places"] * total[way]) for way in WAYS}
    wait = {way: float(np.mean([first for first, _ in own])) for way, own in found.items()}
    lab.table(["batching", "steps", "slots in use", "mean steps before the first token", "most"],
              [[way, total[way], f"{busy[way]:.0%}", wait[way], max(first for first, _ in found[way])] for way in WAYS])
    lab.claim(f"Fixed batches need {total['static'] / total['dynamic']:.2f} times as many steps.",
              total["dynamic"] <= total["static"])
    redraw(lab)
    lab.heading("Every request")
    lab.table(["request", "tokens", *(f"{way}: {what}" for way in WAYS for what in ("first step", "last step"))],
              [[at + 1, count, *(number for way in WAYS for number in found[way][at])]
               for at, count in enumerate(lengths)])


def spans(numflow, model, lengths, places, way) -> list[list[int]]:
    """First and last step of each request, counted from 0."""
    steps: list[list[int]] = [[] for _ in lengths]
    with numflow.Engine(model, places, prefix_cache=False, batching=way) as engine:
        requests = [engine.request(PROMPT, max_tokens=count, ignore_eos=True) for count in lengths]
        with model.core.runner.lock:  # no step begins before all have come
            jobs = [engine.start(request, 1, 0, lambda piece, own=own: own.append(model.core.counts["steps"]))
                    for request, own in zip(requests, steps)]
        for job in jobs:
            job.done.wait()
    begin = min(own[0] for own in steps)
    return [[own[0] - begin, own[count - 1] - begin] for own, count in zip(steps, lengths)]


def redraw(lab):
    """The figure from results alone."""
    found, lengths = lab.results["spans"], lab.results["lengths"]
    made, axes = style.figure(2, 1, (7.2, 4.4))
    total = {way: 1 + max(last for _, last in own) for way, own in found.items()}
    for axis, way in zip(axes, WAYS):
        rows = in_rows(found[way])
        for at, (first, last) in enumerate(found[way]):
            axis.broken_barh([(first, last + 1 - first)], (rows[at] - 0.42, 0.84), edgecolor="white",
                             facecolor=style.SERIES[at % 2 * 2][0])
            if last - first > 1:
                axis.text((first + last + 1) / 2, rows[at], at + 1, ha="center", va="center", fontsize=8,
                          color="black" if at % 2 else "white")
        places = 1 + max(rows)
        axis.axvline(total[way], color=style.SERIES[1][0], linewidth=1, linestyle="--")
        axis.set(xlim=(0, 1.02 * max(total.values())), ylim=(places - 0.4, -0.6), yticks=range(places),
                 yticklabels=range(1, places + 1), ylabel=f"{way}: place")
        axis.grid(axis="y", visible=False)
    axes[1].set_xlabel("steps of the engine (numbers: requests; blank: a place that nobody uses)")
    lab.figure(made, "gantt", f"The same {len(lengths)} requests: {total['static']} steps in fixed batches, "
               f"{total['dynamic']} in a running one", lab.options["model"], f"{lab.options['places']} places",
               hspace=0.22, caption="Every bar is a request, from its first token to its last.")


def in_rows(spans) -> list[int]:
    """A slot for each span: the first free one."""
    rows, until = [0] * len(spans), []
    for at in sorted(range(len(spans)), key=lambda at: spans[at][0]):
        first, last = spans[at]
        free = next((row for row, end in enumerate(until) if end < first), len(until))
        until[free:free + 1] = [last]
        rows[at] = free
    return rows
