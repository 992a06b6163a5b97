"""Sessions: time to the first token after a restart, with a saved session and with the conversation processed again.

In each round the model is loaded twice and answers a short question, so that its weights are in memory. Then the time
to restore the session and to run the request up to its first token is measured.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

OPTIONS = {"model": "smollm2-135m-instruct", "tokens": 4000, "more": 8, "rounds": 3, "threads": 0, "backend": "cpu"}
SHARE = 0.05  # of the time of reading all of it


def run(lab):
    import numflow
    from numflow import registry

    if lab.quick:
        lab.options |= {"tokens": 40, "rounds": 1}
    options, path = lab.options, Path(registry.resolve(lab.options["model"]))
    options["model"] = path.name  # no paths in the report
    how = {"backend": options["backend"], **({"threads": options["threads"]} if options["threads"] else {})}
    times: dict[str, list[float]] = {"read again": [], "taken up": [], "taking up": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "talk.session"
        with numflow.load(path, **how) as model, numflow.Engine(model) as engine:
            ids = np.random.default_rng(0).integers(10, model.vocabulary, options["tokens"] + options["more"]).tolist()
            first(engine, ids[:options["tokens"]])
            size = engine.save_session(file).nbytes
        for number in range(options["rounds"]):
            lab.say(f"round {number + 1} of {options['rounds']}")
            found = {}
            for name, saved in (("read again", None), ("taken up", file)):
                with numflow.load(path, **how) as model, numflow.Engine(model) as engine:
                    first(engine, ids[:3])
                    begin = time.perf_counter()
                    if saved is not None:
                        engine.restore_session(saved)
                        times["taking up"].append(time.perf_counter() - begin)
                    found[name] = first(engine, ids)
                    times[name].append(found[name].moment - begin)
            lab.doubt(found["taken up"].id == found["read again"].id, "the first tokens are not the same")
            lab.doubt(found["taken up"].cached >= options["tokens"] - 32, "the session was not used")
    lab.results |= {"seconds": times, "bytes": size}
    report(lab, times, size, options)


class First:
    """The first token of an answer, its time, and the number of cached prompt tokens."""

    def __init__(self, job, moments):
        self.id, self.moment, self.cached = job.results[0].ids[0], moments[0], job.group.reused


def first(engine, ids) -> First:
    """The first token after a prompt."""
    moments: list[float] = []
    request = engine.request(ids, max_tokens=1, ignore_eos=True, temperature=0)
    job = engine.start(request, 1, 0, lambda piece: moments.append(time.perf_counter()))
    job.done.wait()
    if job.error is not None:
        raise job.error
    return First(job, moments)


def report(lab, times, size: int, options) -> None:
    """A table and a sentence."""
    found = {name: median(own) for name, own in times.items()}
    share = found["taken up"] / found["read again"]
    lab.text(f"A conversation of {options['tokens']} tokens, and {options['more']} new ones; the session file has "
             f"{size / 2**20:.1f} MiB. Medians of {options['rounds']} rounds.")
    alone = found["taking up"]
    lab.table(["conversation", "first token after (s)", "relative to processing it again"],
              [["processed again", f"{found['read again']:.3f}", "100 %"],
               ["restored from its session", f"{found['taken up']:.3f}", f"{100 * share:.1f} %"],
               ["of that: restoring", f"{alone:.3f}", f"{100 * alone / found['read again']:.1f} %"]])
    lab.claim(f"The first token comes within {100 * SHARE:.0f} % of the time of processing the conversation again.",
              share <= SHARE)
    redraw(lab)


def redraw(lab):
    """The figure from results alone."""
    from numflow.lab import style

    seconds = lab.results["seconds"]
    cases = {"read again": "read again", "taken up": "taken up from\nits session"}
    made, axis = style.figure()
    for at, name in enumerate(cases):
        axis.barh(at, median(seconds[name]), color=style.SERIES[at][0], height=0.6)
        axis.text(median(seconds[name]), at, f" {median(seconds[name]):.2f}", va="center", fontsize=8)
    axis.set(xlabel="seconds until the first token", yticks=range(len(cases)), yticklabels=list(cases.values()),
             xlim=(0, 1.12 * max(median(seconds[name]) for name in cases)), ylim=(len(cases) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    share = median(seconds["taken up"]) / median(seconds["read again"])
    lab.figure(made, "first_token", f"A saved conversation of {lab.options['tokens']} tokens goes on in "
               f"{100 * share:.1f} % of the time", lab.options["model"],
               f"{lab.options['threads'] or 'all'} threads", left=1.1)
