"""The measurements: an engine with many sequences, under load, with a cached prompt, and with too little memory."""

import threading
import time
from pathlib import Path

import numpy as np

import numflow

from ..llama_cpp import LlamaCpp


class Clock:
    """Total time inside a program's runs; the rest of the time is the engine's own."""

    def __init__(self, program):
        self.program, self.seconds, self.runs = program, 0.0, 0
        self._run = program.run

    def __enter__(self):
        def run(*args, **options):
            begin = time.perf_counter()
            try:
                return self._run(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begin
                self.runs += 1

        self.program.run = run
        return self

    def __exit__(self, *_):
        del self.program.run


def prompts(model, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random texts of token ids."""
    return np.random.default_rng(seed).integers(10, model.vocabulary, (count, length)).tolist()


def side_by_side(model, sequences: int, prompt: int, new: int, **decoding) -> dict[str, float]:
    """All at once: new tokens a second, of all the time and of that after the last of the first tokens; ms per step."""
    times: list[list[float]] = [[] for _ in range(sequences)]
    with Clock(model.program) as clock, numflow.Engine(model, sequences, prefix_cache=False) as engine:
        requests = [engine.request(ids, max_tokens=new, ignore_eos=True, **decoding)
                    for ids in prompts(model, sequences, prompt)]
        begin = time.perf_counter()
        jobs = [engine.start(request, 1, 0, lambda piece, own=own: own.append(time.perf_counter()))
                for request, own in zip(requests, times)]
        for job in jobs:
            job.done.wait()
        stats = engine.stats
    first, end = max(own[0] for own in times), max(own[new - 1] for own in times)  # the text's end is a separate piece
    late = sum(moment > first for own in times for moment in own[:new])
    return {"new_tok_s": sequences * new / (end - begin), "decode_tok_s": late / (end - first),
            "step_ms": 1e3 * stats["step_s"] / stats["steps"],
            "engine_ms": 1e3 * (stats["step_s"] - clock.seconds) / stats["steps"]}


def llama_side_by_side(peer: LlamaCpp, path: Path, sequences: int, prompt: int, new: int,
                       threads: int) -> dict[str, float]:
    """The same with llama.cpp, which samples no tokens."""
    row = peer.batched_row(path, threads, sequences, prompt, new)
    return {"new_tok_s": sequences * new / row["t"], "decode_tok_s": row["speed_tg"]}


def load_of(count: int, rate: float, longest: int, seed: int) -> list[tuple[float, int, int]]:
    """Requests that arrive at random times (a Poisson process): (when, prompt length, new tokens)."""
    rng = np.random.default_rng(seed)
    when = np.cumsum(rng.exponential(1 / rate, count))
    lengths = np.exp(rng.normal(np.log(longest / 4), 0.6, (count, 2))).clip(8, longest).astype(int)
    return [(float(t), int(prompt), int(new)) for t, (prompt, new) in zip(when, lengths)]


def serve(model, load: list[tuple[float, int, int]], **options) -> dict[str, float]:
    """Results of requests submitted at their arrival times, in seconds and tokens per second."""
    texts, rows = prompts(model, len(load), max(prompt for _, prompt, _ in load), seed=1), []
    waiting: list[threading.Thread] = []
    with numflow.Engine(model, prefix_cache=False, **options) as engine:
        begin = time.perf_counter()

        def wait(handle, came):
            result = handle.result()
            rows.append((time.perf_counter() - begin - came, result.stats["first_token_s"], len(result.ids)))

        for (when, prompt, new), ids in zip(load, texts):
            time.sleep(max(0.0, when - (time.perf_counter() - begin)))
            handle = engine.submit(ids[:prompt], max_tokens=new, ignore_eos=True)
            waiting.append(threading.Thread(target=wait, args=(handle, when)))
            waiting[-1].start()
        for thread in waiting:
            thread.join()
        seconds = time.perf_counter() - begin
    latency, first, new = (np.array(values) for values in zip(*rows))
    return {"new_tok_s": float(new.sum() / seconds), "first_s": float(np.median(first)),
            "first_95_s": float(np.quantile(first, 0.95)), "latency_s": float(np.median(latency)),
            "latency_95_s": float(np.quantile(latency, 0.95)), "per_token_ms": float(1e3 * np.median(latency / new))}


def known_prompt(model, length: int) -> dict[str, float]:
    """Seconds to the first token of a prompt that shares `length` tokens with one before, and of that one."""
    shared, *tails = prompts(model, 1, length, seed=2)[0], *prompts(model, 2, 8, seed=3)
    with numflow.Engine(model) as engine:
        times = [engine.submit([*shared, *tail], max_tokens=2, ignore_eos=True).result().stats["first_token_s"]
                 for tail in tails]
        stats = engine.stats
    return {"first_s": times[0], "second_s": times[1], "ratio": times[0] / times[1],
            "tokens_found": stats["prefix_tokens"]}


def short_of_memory(model, sequences: int, share: float, preemption: str) -> dict[str, float]:
    """Requests that come to need two blocks each, with memory for a share of them: the cost, and whether it shows."""
    size = model.program.block_size
    texts, new = prompts(model, sequences, size - 16, seed=4), 48
    blocks = max(2, int(share * 2 * sequences))
    settings = {"max_tokens": new, "ignore_eos": True}
    with numflow.Engine(model, sequences, prefix_cache=False) as engine:
        roomy = [handle.result().ids for handle in [engine.submit(ids, **settings) for ids in texts]]
    model = fresh(model)
    with numflow.Engine(model, sequences, blocks * model.program.block_bytes, preemption=preemption) as engine:
        begin = time.perf_counter()
        found = [handle.result().ids for handle in [engine.submit(ids, **settings) for ids in texts]]
        seconds, stats = time.perf_counter() - begin, engine.stats
    return {"new_tok_s": sequences * new / seconds, "preemptions": stats["preemptions"], "same_tokens": found == roomy,
            "kv_mib": stats["kv_bytes"] / 2**20, "budget_mib": blocks * model.program.block_bytes / 2**20,
            "measured_mib": model.program.kv_bytes / 2**20}


def fresh(model):
    """The model without reserved KV memory."""
    from numflow.engine.model import Model

    model.program.reserve(0)
    return Model(model.network, model.program, ends=frozenset())


def mixed(model, sequences: int, new: int) -> bool:
    """Whether requests of many lengths and settings give the tokens that each gives alone."""
    rng = np.random.default_rng(5)
    kinds = [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.0, "seed": 2, "top_k": 40, "top_p": 0.9},
             {"repetition_penalty": 1.2}, {"num_beams": 3}, {"temperature": 0.7, "seed": 3, "min_p": 0.05},
             {"no_repeat_ngram": 3}, {"speculate": "ngram"}]
    requests = [(ids[:int(rng.integers(1, 200))], kinds[i % len(kinds)] | {"max_tokens": int(rng.integers(1, new))})
                for i, ids in enumerate(prompts(model, sequences, 200, seed=6))]
    with numflow.Engine(model, 2 * sequences) as engine:
        handles = [engine.submit(ids, **settings) for ids, settings in requests]
        together = [handle.result().ids for handle in handles]
    return together == [model.generate(ids, **settings).ids for ids, settings in requests]
