"""Benchmark of a model: loading, prefill and decoding, with facts of the machine."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from numflow.engine.load import load
from numflow.engine.measure.bench_runs import Measure, spread
from numflow.engine.measure.host import host
from numflow.errors import RequestError

FIRST_PROMPT = 16  # tokens of the prompt for first_token_s
_OMITTED = ("backend", "activations", "threads", "offline", "progress")  # have their own keys, or no effect


def bench(path_or_name: str | Path, prompt_tokens: int | Sequence[int] = 512, gen_tokens: int = 128, repeat: int = 5,
          since: float | None = None, progress: Callable[[str], None] | None = None, *,
          contexts: Sequence[int] = (), batches: Sequence[int] = (), profiled: bool = False, **load_options) -> dict:
    """Load a model and measure it: a prompt of random tokens, then greedy decoding that ignores end tokens.

    prompt_tokens: one length of prompt, or several.
    since:    time.time() at which first_token_s begins, such as process_start(); None: the start of loading.
    contexts: also decode after contexts of these lengths. batches: also decode batches of these numbers of sequences.
    profiled: also profile a prompt and a decoding step, and measure the machine's limits.
    load_options: as in `load`.

    Returns:
        prefill_tok_s (of the first length), decode_tok_s: {median, min, max, samples}; load_s; first_token_s (to the
        first new token of a 16-token prompt) and first_token_from; compile_s; peak_rss_mib; weights_bytes; the
        settings (`options`: further options of `load`, such as devices); host facts. On request: prefill, decode,
        batched {size: spread}; limits; profile {prefill, decode}, rows as in measure/profile.py.

    Raises:
        RequestError: sizes out of range; and the errors of `load`.
    """
    lengths = [prompt_tokens] if isinstance(prompt_tokens, int) else list(prompt_tokens)
    _check(lengths, contexts, batches, gen_tokens, repeat)
    begin, load_begin = since or time.time(), time.perf_counter()
    with load(path_or_name, **load_options) as model:
        load_s = time.perf_counter() - load_begin
        model.generate([0] * min(FIRST_PROMPT, model.context - 1), max_tokens=1, ignore_eos=True)
        first_token_s = time.time() - begin
        measure = Measure(model, repeat, progress or (lambda line: None))
        runs = measure.generate(lengths[0], gen_tokens)
        result = {
            "model": str(path_or_name), "backend": load_options.get("backend", "cpu"),
            "activations": model.program.activations,
            "threads": model.program.threads,
            "prompt_tokens": lengths[0], "gen_tokens": gen_tokens, "repeat": repeat,
            "prefill_tok_s": spread([run["prefill_tok_s"] for run in runs]),
            "decode_tok_s": spread([run["decode_tok_s"] for run in runs]),
            "load_s": load_s, "first_token_s": first_token_s,
            "first_token_from": "start of loading" if since is None else "start of the process",
            "compile_s": float(model.program.compile_s),
            "weights_bytes": int(model.program.weights_bytes), "bits_per_weight": model.bits_per_weight,
            "options": {name: str(value) for name, value in load_options.items() if value and name not in _OMITTED
                        and (name != "transport" or load_options.get("devices"))},
            "host": host(),
        }
        more = (("prefill", measure.prefill, (lengths[1:],)), ("decode", measure.decode, (contexts, gen_tokens)),
                ("batched", measure.batched, (batches, gen_tokens)))
        result |= {name: fn(*sizes) for name, fn, sizes in more if sizes[0]}
        result["peak_rss_mib"] = peak_rss_mib()  # before measuring the limits, which takes memory too
        return result | (_profile(model, lengths[0]) if profiled else {})


def _check(lengths: Sequence[int], contexts: Sequence[int], batches: Sequence[int], gen_tokens: int,
           repeat: int) -> None:
    given = [("prompt_tokens", n, 1) for n in lengths] + [("contexts", n, 0) for n in contexts]
    given += [("batches", n, 1) for n in batches] + [("gen_tokens", gen_tokens, 2), ("repeat", repeat, 1)]
    for name, value, least in given:
        if value < least:
            raise RequestError(f"{name} should be at least {least}, is {value}")
    if not lengths:
        raise RequestError("prompt_tokens should name at least one length")


def _profile(model, tokens: int) -> dict:
    from numflow.engine.measure.profile import machine_limits, profile

    limits = machine_limits(model.program)
    return {"limits": asdict(limits), "profile": {"prefill": profile(model, limits, tokens, 0),
                                                  "decode": profile(model, limits, 1, tokens)}}


def process_start() -> float | None:
    """Start of this process, as time.time(); None if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def peak_rss_mib() -> float | None:
    """Peak resident memory of this process; None if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration):
        pass  # not Linux. On Linux getrusage is not used: it includes the peak of the parent process
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
