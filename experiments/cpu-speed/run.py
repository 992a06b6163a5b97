"""Speed on the CPU, beside llama.cpp on the same weights in the same run.

Prefill of 512 tokens and decoding of 128 after 32, by quantisation and by threads. The two engines take turns, run by
run; llama.cpp's programs are looked for in the folder named by the option `llama_cpp` (or $NUMFLOW_LLAMA_CPP), and left
out where there are none. Also measured: how fast this machine reads memory, as the limit of decoding.
"""

import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

OPTIONS = {"llama_cpp": os.environ.get("NUMFLOW_LLAMA_CPP", ""), "models": "smollm2-135m-instruct", "threads": "1,2",
           "rounds": 5, "prompt": 512, "generate": 128}
AFTER = 32  # tokens in the cache when decoding begins


def run(lab):
    import numflow

    if lab.quick:
        lab.options |= {"rounds": 1, "prompt": 32, "generate": 8, "threads": "1"}
    threads = [int(t) for t in lab.options["threads"].split(",")]
    peer = _llama_bench(lab.options["llama_cpp"])
    rows = []
    for name in lab.options["models"].split(","):
        path = numflow.registry.resolve(name)
        for count in threads:
            lab.say(f"{Path(path).name}, {count} threads")
            rows.append(_compare(lab, path, count, peer))
    reading = {count: _read_bandwidth(count, lab.quick) for count in threads}
    lab.results |= {"rows": rows, "read_gb_s": reading, "llama_cpp": bool(peer)}
    _report(lab, rows, reading, peer)


def _compare(lab, path, threads, peer):
    """Alternating runs of both engines on one file; tokens/s as lists of samples."""
    import numflow

    prompt, generate, rounds = (lab.options[key] for key in ("prompt", "generate", "rounds"))
    samples = {"prefill": [], "decode": [], "peer_prefill": [], "peer_decode": []}
    with numflow.load(path, threads=threads) as model:
        ids = np.random.default_rng(0).integers(0, model.vocabulary, prompt).tolist()
        model.generate(ids[:8], max_tokens=4, ignore_eos=True)
        for _ in range(rounds):
            samples["prefill"].append(model.generate(ids, max_tokens=1, ignore_eos=True).stats["prefill_tok_s"])
            samples["decode"].append(
                model.generate(ids[:AFTER], max_tokens=generate + 1, ignore_eos=True).stats["decode_tok_s"])
            if peer:
                samples["peer_prefill"].append(_peer(peer, path, threads, ["-p", str(prompt), "-n", "0"]))
                samples["peer_decode"].append(
                    _peer(peer, path, threads, ["-p", "0", "-n", str(generate), "-d", str(AFTER)]))
        weights = int(model.program.weights_bytes)
    return {"model": Path(path).name, "threads": threads, "weights_bytes": weights, **samples}


def _llama_bench(folder):
    program = Path(folder) / "llama-bench" if folder else None
    return program if program and program.exists() else None


def _peer(program, path, threads, what):
    command = [str(program), "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json", *what]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    return json.loads(out)[0]["avg_ts"]


def _read_bandwidth(threads, quick):
    """GB/s at which `threads` threads together sum 512 MiB of float32; the best of several."""
    from concurrent.futures import ThreadPoolExecutor

    parts = np.array_split(np.ones((1 << 20 if quick else 1 << 27), np.float32), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3 if quick else 10):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - begin)
    return sum(part.nbytes for part in parts) / min(times) / 1e9


def _spread(values):
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})" if values else ""


def _ratio(ours, theirs):
    return statistics.median(ours) / statistics.median(theirs) if theirs else None


def _report(lab, rows, reading, peer):
    lab.text(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    lab.heading("Tokens per second: median (lowest-highest)")
    lab.table(["model", "threads", "prefill", "llama.cpp", "ratio", "decode", "llama.cpp", "ratio", "GB/s of weights"],
              [[r["model"], r["threads"], _spread(r["prefill"]), _spread(r["peer_prefill"]),
                _ratio(r["prefill"], r["peer_prefill"]), _spread(r["decode"]), _spread(r["peer_decode"]),
                _ratio(r["decode"], r["peer_decode"]), statistics.median(r["decode"]) * r["weights_bytes"] / 1e9]
               for r in rows])
    lab.text("Memory reads, the limit of decoding a model larger than the cache: " + ", ".join(
        f"{value:.1f} GB/s with {count} threads" for count, value in reading.items()) + "."
        + ("" if peer else " llama.cpp was not at hand, so its columns are empty."))
    plt = lab.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.5 * len(rows) + 1.5), sharey=True)
    labels = [f"{r['model'].rsplit('.', 1)[0]}, {r['threads']}T" for r in rows]
    for axis, kind in zip(axes, ("prefill", "decode"), strict=True):
        at = np.arange(len(rows))
        axis.barh(at - 0.2, [statistics.median(r[kind]) for r in rows], 0.4, label="numflow")
        if peer:
            axis.barh(at + 0.2, [statistics.median(r[f"peer_{kind}"]) for r in rows], 0.4, label="llama.cpp")
        axis.set(yticks=at, yticklabels=labels, xlabel="tokens/s", title=kind)
        axis.invert_yaxis()
        axis.legend()
    lab.figure(figure, "tokens_per_second", "Prefill and decode, median of the runs")
    plt.close(figure)
