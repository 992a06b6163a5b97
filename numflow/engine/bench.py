"""How fast a model loads, reads and writes, and on what machine."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np

from numflow.engine.load import load
from numflow.errors import RequestError

FIRST_PROMPT = 16  # tokens of the prompt whose first token is waited for after loading


def bench(path_or_name: str | Path, prompt_tokens: int = 512, gen_tokens: int = 128, repeat: int = 5,
          since: float | None = None, progress: Callable[[str], None] | None = None, **load_options) -> dict:
    """Load a model and measure it: a prompt of random tokens, then greedy decoding that no end token stops.

    since: time.time() from which first_token_s counts, as process_start() gives it; None: the start of loading.
    load_options: as in `load`.

    Returns:
        prefill_tok_s, decode_tok_s: {median, min, max, samples}; load_s; first_token_s (to the first new token of a
        16-token prompt) and first_token_from; compile_s; peak_rss_mib; weights_bytes; the settings; host facts.

    Raises:
        RequestError: sizes out of range; and whatever `load` raises.
    """
    for name, value, least in (("prompt_tokens", prompt_tokens, 1), ("gen_tokens", gen_tokens, 2),
                               ("repeat", repeat, 1)):
        if value < least:
            raise RequestError(f"{name} should be at least {least}, is {value}")
    begin, load_begin = since or time.time(), time.perf_counter()
    with load(path_or_name, **load_options) as model:
        load_s = time.perf_counter() - load_begin
        ids = np.random.default_rng(0).integers(0, model.vocabulary, prompt_tokens).tolist()
        model.generate(ids[:FIRST_PROMPT], max_tokens=1, ignore_eos=True)
        first_token_s = time.time() - begin
        runs = []
        for number in range(1, repeat + 1):
            runs.append(model.generate(ids, max_tokens=gen_tokens, ignore_eos=True).stats)
            if progress is not None:
                progress(f"run {number} of {repeat}")
        return {
            "model": str(path_or_name), "backend": load_options.get("backend", "cpu"),
            "activations": getattr(model.program, "activations", load_options.get("activations", "int8")),
            "threads": getattr(model.program, "threads", load_options.get("threads")),
            "prompt_tokens": prompt_tokens, "gen_tokens": gen_tokens, "repeat": repeat,
            "prefill_tok_s": _spread([run["prefill_tok_s"] for run in runs]),
            "decode_tok_s": _spread([run["decode_tok_s"] for run in runs]),
            "load_s": load_s, "first_token_s": first_token_s,
            "first_token_from": "start of loading" if since is None else "start of the process",
            "compile_s": float(getattr(model.program, "compile_s", 0.0)), "peak_rss_mib": peak_rss_mib(),
            "weights_bytes": int(model.program.weights_bytes), "bits_per_weight": model.bits_per_weight,
            "host": host(),
        }


def _spread(samples: list[float]) -> dict:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": samples}


def process_start() -> float | None:
    """When this process started, as time.time(); None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def peak_rss_mib() -> float | None:
    """Largest resident memory of this process so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def host() -> dict:
    """Facts about machine and versions that a measurement needs beside it."""
    versions: dict[str, str | None] = {}
    for package in ("numflow", "numpy", "numba", "llvmlite"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_name(), "cores": cores, "system": platform.platform(), "machine": platform.machine(),
            "python": platform.python_version(), **versions}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
