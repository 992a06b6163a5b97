"""The part on files: decoding speed of models of about 1 GB whose matrices all have one GGUF type.

Weights are random, because the speed does not depend on them. llama.cpp, if available, runs the same file.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from numflow.cpu.runtime.cores import default_threads
from numflow.formats import gguf_writer
from numflow.formats.types import TYPES
from numflow.formats.writer import TensorEntry
from numflow.lab.random_rows import random_rows
from numflow.quant.grids import GRIDS

from ..llama_cpp import LlamaCpp
from .speed import _random, _read_seconds

TYPES_OF_FILES = ("Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "IQ3_S",
                  "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0", "Q1_0", "Q2_0")
WIDTH, FFN, HEADS, VOCABULARY = 2048, 8192, 16, 258
BYTES, TOKENS, ROUNDS = 1 << 30, 16, 5
STEADY = 1.15  # largest ratio of the plain reads before and after a round that counts


def files_part(lab, places):
    """Decoding speed of whole models beside llama.cpp; types that are not run keep their earlier results."""
    threads, load = default_threads(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    wanted = [kind for kind in lab.options["types"].split(",") if kind in TYPES_OF_FILES] or list(TYPES_OF_FILES)
    peer = LlamaCpp(places["llama_cpp"])
    before = (lab.before().get("results") or {}).get("files", []) if lab.options["merge"] else []
    # Older results have one plain read for each round, before numflow's turn.
    rows = {(row["type"], row.get("iq", "compact")): row for row in before if row["type"] in TYPES_OF_FILES}
    for row in rows.values():
        row["read_gb_s"] = [read if isinstance(read, list) else [read, read] for read in row["read_gb_s"]]
    memory = _random((8 if lab.quick else 512) << 20)
    for kind, iq in forms(wanted[:1] if lab.quick else wanted):
        lab.say(f"a file of {kind}")
        rows[kind, iq] = {"type": kind, "iq": iq, "load": load, **measure(kind, iq, threads, peer, memory, lab.quick)}
    lab.results |= {"files": [rows[form] for form in forms(TYPES_OF_FILES) if form in rows]}
    report(lab, lab.results["files"], threads, wanted if len(forms(wanted)) < len(rows) else [])


def forms(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Types with the option iq: both values for IQ1 to IQ3."""
    return [(kind, iq) for kind in kinds for iq in (("fast", "compact") if kind in GRIDS else ("compact",))]


def measure(kind: str, iq: str, threads: int, peer: LlamaCpp, memory: np.ndarray, quick: bool = False) -> dict:
    """Bytes in the file and in memory, and tokens/s of some rounds in which both take turns. read_gb_s: plain reads
    right before and after numflow's turn."""
    import numflow

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "model.gguf", kind, 1 << 20 if quick else BYTES, quick)
        getattr(os, "sync", lambda: None)()  # else the system writes the file to disk during the rounds
        os.environ["NUMFLOW_PREPARED"], kept = "0", os.environ.get("NUMFLOW_PREPARED")
        try:
            with numflow.load(path, threads=threads, iq=iq, progress=False) as model:
                ours, theirs, reads = [], [], []
                tokens_per_second(model, 2)
                for _ in range(1 if quick else ROUNDS):
                    before = memory.nbytes / _read_seconds(memory, threads) / 1e9
                    ours.append(tokens_per_second(model, TOKENS))
                    reads.append([before, memory.nbytes / _read_seconds(memory, threads) / 1e9])
                    if peer:
                        theirs.append(peer.decode(path, threads, 0, TOKENS))
                size = model.program.weights_bytes
        finally:
            os.environ.pop("NUMFLOW_PREPARED")
            if kept is not None:
                os.environ["NUMFLOW_PREPARED"] = kept
        return {"file_bytes": path.stat().st_size, "memory_bytes": size, "read_gb_s": reads, "tokens_s": ours,
                "llama_cpp_tokens_s": theirs, "threads": threads}


def tokens_per_second(model, count: int) -> float:
    """Of so many tokens, from the second on."""
    times = []
    for new in (1, count + 1):
        begin = time.perf_counter()
        model.generate([1, 2, 3], max_tokens=new, ignore_eos=True, temperature=0)
        times.append(time.perf_counter() - begin)
    return count / (times[1] - times[0])


def write_model(path: Path, kind: str, nbytes: int, quick: bool = False) -> Path:
    """A decoder of random weights with about the given size and no vocabulary; all layers are equal."""
    width, ffn = (256, 512) if quick else (WIDTH, FFN)
    sizes = {f"attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    sizes |= {"ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
    layer = [TensorEntry(name, kind, size, rows.nbytes, partial(_same, rows)) for name, size in sizes.items()
             for rows in [random_rows(kind, *size)]]
    layer += [TensorEntry.of(name, np.ones(width, np.float32)) for name in ("attn_norm", "ffn_norm")]
    table = np.random.default_rng(1).standard_normal((VOCABULARY, width), np.float32)
    entries = [TensorEntry.of(f"{name}.weight", table) for name in ("token_embd", "output")]
    entries.append(TensorEntry.of("output_norm.weight", np.ones(width, np.float32)))
    layers = max(1, round(nbytes / sum(entry.nbytes for entry in layer)))
    entries += [replace(entry, name=f"blk.{n}.{entry.name}.weight") for n in range(layers) for entry in layer]
    about = {"vocab_size": VOCABULARY, "block_count": layers, "context_length": 256, "embedding_length": width,
             "feed_forward_length": ffn, "attention.head_count": HEADS, "attention.head_count_kv": HEADS,
             "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": width // HEADS}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    gguf_writer.write(path, *gguf_writer.made_pairs(metadata | {f"llama.{key}": value for key, value in about.items()}),
                      entries)
    return path


def _same(rows: np.ndarray) -> np.ndarray:
    return rows


def report(lab, rows: list[dict], threads: int, only: list[str]) -> None:
    """A table with the best of each, as bytes of the file for each second and as a share of a plain read.

    only: what was measured now, where it is not all.
    """
    lab.heading("Whole models of GGUF's types on the CPU")
    reads = [read for row in rows for pair in row["read_gb_s"] for read in pair]
    loads, them = [row["load"] for row in rows], any(row["llama_cpp_tokens_s"] for row in rows)
    lab.text(f"Decoders of {WIDTH} columns with as many layers as make a file of about 1 GB, all matrices of one type; "
             f"{TOKENS} tokens with {threads} threads, the best of {ROUNDS} rounds. A token reads the whole file once; "
             "GB/s counts its bytes. The share is the median of rounds, each relative to plain reads right before and "
             f"after, {min(reads):.1f} to {max(reads):.1f} GB/s. Rounds between reads that differ by a factor of over "
             f"{STEADY} are left out, unless all are. "
             f"The load average before was {min(loads):.1f} to {max(loads):.1f}."
             + (" llama-bench took turns on the same file." if them else " llama.cpp was not available.")
             + " IQ1 to IQ3 run with --iq fast, where compact is not said."
             + (f" Measured in this run: {', '.join(only)}; the others earlier." if only else ""))
    lab.table(["type", "bits in the file", "memory / file", "tokens/s", "GB/s", "share of reading",
               *(["llama.cpp tokens/s", "its share", "times as fast"] if them else [])],
              [_row(row, them) for row in rows])


def _row(row: dict, them: bool) -> list[str]:
    best, peer = max(row["tokens_s"]), max(row["llama_cpp_tokens_s"], default=0.0)
    speed = best * row["file_bytes"] / 1e9
    kind = TYPES[row["type"]]
    compact = row["type"] in GRIDS and row.get("iq", "compact") == "compact"
    name = row["type"] + (", compact" if compact else "")
    cells = [name, f"{8 * kind.size / kind.block:.2f}", f"{row['memory_bytes'] / row['file_bytes']:.2f}",
             f"{best:.1f}", f"{speed:.1f}", f"{_share(row, row['tokens_s']):.0%}"]
    if not them:
        return cells
    return cells + ([f"{peer:.1f}", f"{_share(row, row['llama_cpp_tokens_s']):.0%}", f"{best / peer:.2f}"] if peer else
                    ["", "", ""])


def _share(row: dict, tokens_s: list[float]) -> float:
    """Bytes of the file that tokens read in a second, relative to plain reads: the median over steady rounds."""
    rounds = list(zip(tokens_s, row["read_gb_s"]))
    steady = [(rate, pair) for rate, pair in rounds if max(pair) <= STEADY * min(pair)] or rounds
    return median(rate * row["file_bytes"] / 1e9 / (sum(pair) / 2) for rate, pair in steady)
