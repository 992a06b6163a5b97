"""Batching: speed of many requests in one batch, static and dynamic, beside single requests and llama.cpp.

Rates are medians over rounds in which the engines take turns. The option `llama_cpp` (or $NUMFLOW_LLAMA_CPP) names the
folder of llama.cpp's programs; the report names programs that are missing.
"""

import os
from pathlib import Path
from statistics import median

from ..llama_cpp import LlamaCpp
from . import measure, show

# Lists have commas between. loads: shares of the rate that the engine can serve. threads: 0 for all cores.
OPTIONS = {"model": "smollm2-135m-instruct", "sequences": "1,2,4,8,16,32", "prompt": 32, "new": 32, "rounds": 3,
           "loads": "0.3,0.6,0.9", "requests": 40, "longest": 128, "shared": 1000, "threads": 0,
           "llama_cpp": os.environ.get("NUMFLOW_LLAMA_CPP", "")}


def run(lab):
    import numflow
    from numflow import registry

    if lab.quick:
        lab.options |= {"sequences": "1,4", "new": 8, "rounds": 1, "loads": "0.5", "requests": 6, "longest": 32,
                        "shared": 300}
    options = lab.options
    path, peer = Path(registry.resolve(options["model"])), LlamaCpp(options["llama_cpp"])
    options |= {"llama_cpp": "llama-batched-bench" if peer else "", "model": path.name}  # no paths in the report
    threads = options["threads"] or len(os.sched_getaffinity(0))
    with numflow.load(path, threads=threads) as model:
        model.generate([1, 2, 3], max_tokens=2)
        counts = [int(n) for n in options["sequences"].split(",")]
        found = {"load_average": [os.getloadavg()[0]], "threads": threads,
                 "scale": scale(lab, model, peer, path, counts, threads)}
        found["serving"] = serving(lab, model, [float(share) for share in options["loads"].split(",")])
        lab.say("prefix cache")
        known = [measure.known_prompt(model, options["shared"]) for _ in range(options["rounds"])]
        found["prefix"] = {name: median(one[name] for one in known) for name in known[0]}
        lab.say("memory")
        found["memory"] = {kind: measure.short_of_memory(measure.fresh(model), counts[-1], 0.3, kind)
                           for kind in ("swap", "recompute")}
        lab.say("mixed requests")
        found["mixed"] = measure.mixed(measure.fresh(model), counts[-1], options["new"])
        found["load_average"].append(os.getloadavg()[0])
        lab.results |= found
        show.report(lab, found)


def scale(lab, model, peer, path, counts, threads) -> dict:
    """Rates at each number of sequences; the engines take turns, and every round goes through all numbers."""
    options = lab.options
    samples: dict = {count: {"numflow": [], "llama.cpp": [], "sampling": []} for count in counts}
    for number in range(options["rounds"]):
        for count, own in samples.items():
            lab.say(f"round {number + 1} of {options['rounds']}: {count} sequences")
            what = count, options["prompt"], options["new"]
            own["numflow"].append(measure.side_by_side(model, *what))
            if peer:
                own["llama.cpp"].append(measure.llama_side_by_side(peer, path, *what, threads))
            own["sampling"].append(measure.side_by_side(model, *what, temperature=0.8, top_p=0.9, seed=1))
    found: dict = {}
    for count, own in samples.items():
        found[count] = {engine: {name: median(row[name] for row in rows) for name in rows[0]}
                        for engine, rows in own.items() if rows}
        found[count]["samples"] = own
    return found


WAYS = {"dynamic": {}, "static": {"batching": "static"}, "one by one": {"max_batch": 1}}


def serving(lab, model, shares) -> list[dict]:
    """Latency and throughput of each way to batch, under the same loads: every round goes through all loads and ways,
    so that what else the machine does falls on all of them."""
    options = lab.options
    trial = [(0.0, prompt, new) for _, prompt, new in measure.load_of(options["requests"], 1.0, options["longest"], 7)]
    rate = measure.serve(model, trial)["new_tok_s"] / (sum(new for *_, new in trial) / len(trial))
    samples: dict = {(share, kind): [] for share in shares for kind in WAYS}
    for number in range(options["rounds"]):
        for (share, kind), own in samples.items():
            lab.say(f"round {number + 1} of {options['rounds']}: load {share:g}, {kind}")
            load = measure.load_of(options["requests"], share * rate, options["longest"], 7)
            own.append(measure.serve(model, load, **WAYS[kind]))
    return [{"load": share, "requests_s": share * rate, "batching": kind,
             **{name: median(row[name] for row in own) for name in own[0]}, "samples": own}
            for (share, kind), own in samples.items()]


def redraw(lab):
    """Figures from results alone."""
    show.sequences_figure(lab, lab.results["scale"])
    show.load_figure(lab, lab.results["serving"])
