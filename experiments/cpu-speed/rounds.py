"""The measurements: runs of numflow and of the others in turns, each sample kept on disk as soon as there is one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..llama_cpp import LlamaCpp
from .peers import Torch
from .quiet import Watch

PROMPT, GENERATE, AFTER = 512, 128, 32  # tokens of a prompt; tokens decoded, and those before them
STEPS = 16                              # of batched decoding, and at a long context
AGAIN = 2                               # rounds that are repeated at most, for each that is wanted
SENTENCE, SENTENCES = 128, (1, 32)      # tokens of a sentence; sentences at once


class Samples:
    """Samples: lists of numbers by key, stored in a file, so that an interrupted run continues where it stopped.

    again: measure the requested samples again; other samples stay.
    """

    def __init__(self, path: Path, rounds: int, resume: bool, again: bool = False):
        self._path, self.rounds, self._again = path, rounds, again
        self._asked: set[tuple] = set()
        resume = resume or again
        self.values: dict[str, list[float]] = json.loads(path.read_text()) if resume and path.exists() else {}

    def missing(self, *key) -> bool:
        """Whether a key has fewer samples than there are rounds."""
        if self._again and key[:-1] not in self._asked:
            self._asked.add(key[:-1])
            group = _text(key[:-1])
            self.values = {k: v for k, v in self.values.items() if k.rpartition("|")[0] != group}
        return len(self.of(*key)) < self.rounds

    def of(self, *key) -> list[float]:
        return self.values.get(_text(key), [])

    def add(self, value: float, *key) -> None:
        self._set([*self.of(*key), float(value)], *key)

    def note(self, value: float, *key) -> None:
        """A constant value, the same in all rounds."""
        self._set([float(value)], *key)

    def _set(self, values: list[float], *key) -> None:
        self.values[_text(key)] = values
        self._path.write_text(json.dumps(self.values, indent=1))


def _text(key: tuple) -> str:
    return "|".join(map(str, key))


@dataclass(frozen=True)
class Subject:
    """A model that is measured: its file or folder, and numflow's activations; None: the default."""

    path: Path
    activations: str | None = None

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.path.name}, {self.activations}" if self.activations else self.path.name

    @property
    def options(self) -> dict:
        """Options of `numflow.load`."""
        return {"activations": self.activations} if self.activations else {}


class Model:
    """numflow on one model: speeds of single runs."""

    def __init__(self, path: Path, threads: int, **options):
        import numflow

        self.model = numflow.load(path, threads=threads, **options)
        self._rng = np.random.default_rng(0)
        self.generate(8, 4)

    def generate(self, prompt: int, new: int) -> dict:
        ids = self._rng.integers(0, self.model.vocabulary, prompt).tolist()
        return self.model.generate(ids, max_tokens=new, ignore_eos=True).stats

    def prefill(self, tokens: int) -> float:
        return self.generate(tokens, 1)["prefill_tok_s"]

    def decode(self, after: int, new: int) -> float:
        return self.generate(max(after, 1), new + 1)["decode_tok_s"]

    def batched(self, sequences: int, after: int, steps: int) -> float:
        from numflow.engine.measure.bench_runs import Measure

        measure = Measure(self.model, 1, lambda line: None)
        return measure.batched([sequences], steps)[str(sequences)]["median"]

    def close(self) -> None:
        self.model.close()


def by_model(lab, samples: Samples, peers: list[LlamaCpp], watch: Watch, subject: Subject, threads: int) -> None:
    """Prefill of 512 tokens and decoding of 128 after 32."""
    key = ("model", subject.name, threads)
    if not samples.missing(*key, "decode"):
        return
    model = Model(subject.path, threads, **subject.options)
    samples.note(model.model.program.weights_bytes, *key, "bytes")

    def turn() -> dict[str, float]:
        found = {"prefill": model.prefill(PROMPT)}
        for peer in peers:
            found[f"{peer.key} prefill"] = peer.prefill(subject.path, threads, PROMPT)
            found[f"{peer.key} decode"] = peer.decode(subject.path, threads, AFTER, GENERATE)
        return found | {"decode": model.decode(AFTER, GENERATE)}

    in_quiet(samples, watch, key, threads, turn)
    model.close()
    _say(lab, samples, key, ("prefill", "decode"))


def by_context(lab, samples: Samples, peers: list[LlamaCpp], watch: Watch, subject: Subject, threads: int,
               contexts: list[int]) -> None:
    """Decoding after long prompts."""
    keys = [("context", subject.name, threads, context) for context in contexts]
    if not any(samples.missing(*key, "decode") for key in keys):
        return
    model = Model(subject.path, threads, **subject.options)
    for key in keys:
        in_quiet(samples, watch, key, threads, lambda after=key[-1]: {
            **{f"{peer.key} decode": peer.decode(subject.path, threads, after, STEPS) for peer in peers},
            "decode": model.decode(after, STEPS)})
        _say(lab, samples, key, ("decode",))
    model.close()


def by_batch(lab, samples: Samples, peers: list[LlamaCpp], watch: Watch, subject: Subject, threads: int,
             counts: list[int]) -> None:
    """Decoding of several sequences together, each after 32 tokens."""
    keys = [("batch", subject.name, threads, count) for count in counts]
    if not any(samples.missing(*key, "decode") for key in keys):
        return
    model = Model(subject.path, threads, **subject.options)
    for key in keys:
        in_quiet(samples, watch, key, threads, lambda count=key[-1]: {
            **{f"{peer.key} decode": peer.batched(subject.path, threads, count, AFTER, STEPS) for peer in peers},
            "decode": model.batched(count, AFTER, STEPS)})
        _say(lab, samples, key, ("decode",))
    model.close()


def beside_others(lab, samples: Samples, peers: list[LlamaCpp], subject: Subject, threads: int, busy: int) -> None:
    """Decoding of 32 tokens after 32, beside a number of programs that compute without end."""
    key = ("busy", subject.name, threads, busy)
    if not samples.missing(*key, "decode"):
        return
    model = Model(subject.path, threads, **subject.options)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        while samples.missing(*key, "decode"):
            found = {f"{peer.key} decode": peer.decode(subject.path, threads, AFTER, AFTER) for peer in peers}
            _add(samples, key, found | {"decode": model.decode(AFTER, AFTER)})
    finally:
        for other in others:
            other.kill()
            other.wait()
        model.close()
    _say(lab, samples, key, ("decode",))


def in_quiet(samples: Samples, watch: Watch, key: tuple, threads: int, turn: Callable[[], dict[str, float]]) -> None:
    """Take rounds until there are enough samples; one that was disturbed is repeated, AGAIN times as many at most.

    Where even that is too few, the quietest of the disturbed ones fill up, and are counted as such. Notes of a key:
    rounds "repeated", samples "disturbed", the most cores that others took, and the lowest and highest bandwidth.
    """
    spare: list[tuple[float, dict[str, float]]] = []
    others, speeds, left = [0.0], [], AGAIN * samples.rounds
    while samples.missing(*key, "decode") and len(spare) < left:
        results, quiet = watch.round(threads, turn)
        if quiet.disturbed:
            spare.append((quiet.others + 1 - min(quiet.before, quiet.after) / quiet.best, results))
            continue
        others.append(quiet.others)
        speeds += [quiet.before, quiet.after]
        _add(samples, key, results)
    filled = 0
    for _, results in sorted(spare, key=lambda one: one[0]):
        if not samples.missing(*key, "decode"):
            break
        filled += 1
        _add(samples, key, results)
    for name, value in (("repeated", len(spare) - filled), ("disturbed", filled), ("others", max(others)),
                        *([("slowest memory", min(speeds)), ("fastest memory", max(speeds))] if speeds else [])):
        samples.note(value, *key, name)


def _add(samples: Samples, key: tuple, results: dict[str, float]) -> None:
    """Add the results of one round; "decode" last, because its presence marks a complete round."""
    for name in sorted(results, key=lambda name: name == "decode"):
        samples.add(results[name], *key, name)


def beside_torch(lab, samples: Samples, python: str, path: Path, shape: str, encoder: Path, threads: int) -> None:
    """Prefill beside a model of the same shape in torch's bfloat16, and sentences per second beside float32."""
    key = ("torch", path.name, threads)
    if samples.missing(*key, "prefill"):
        from numflow.lab.shapes import find_shape

        found = find_shape(shape)
        config = found.config() | {"vocab_size": found.vocabulary, "tie_word_embeddings": True}
        model, other = Model(path, threads), Torch(python, "decoder", json.dumps(config), threads)
        lab.results["torch"] = other.versions
        other.seconds(1, PROMPT)
        while samples.missing(*key, "prefill"):
            samples.add(model.prefill(PROMPT), *key, "prefill")
            samples.add(PROMPT / other.seconds(1, PROMPT), *key, "peer prefill")
        model.close()
        other.close()
        _say(lab, samples, key, ("prefill",))
    key = ("torch", encoder.name, threads)
    if samples.missing(*key, SENTENCES[-1], "sentences"):
        import numflow

        model, other = numflow.load(encoder, threads=threads), Torch(python, "encoder", encoder, threads)
        for count in SENTENCES:
            rows = [list(range(1000, 1000 + SENTENCE))] * count
            repeat = max(1, 32 // count)
            for run in range(samples.rounds + 1):  # the first one warms up
                ours = _sentences(model, rows, repeat)
                theirs = count / other.seconds(count, SENTENCE, repeat)
                if run and samples.missing(*key, count, "sentences"):
                    samples.add(theirs, *key, count, "peer sentences")
                    samples.add(ours, *key, count, "sentences")
            _say(lab, samples, (*key, count), ("sentences",))
        model.close()
        other.close()


def _sentences(model, rows: list[list[int]], repeat: int) -> float:
    """Texts per second of an encoder in batches, with hidden states of every token."""
    from numflow.engine.runner.batches import BatchPart

    at_once = 512 // SENTENCE  # what fits a core's cache
    begin = time.perf_counter()
    for _ in range(repeat):
        for first in range(0, len(rows), at_once):
            group = [np.array(ids, np.int32) for ids in rows[first:first + at_once]]
            with ExitStack() as stack:
                parts = [BatchPart(stack.enter_context(model.runner.open(len(ids))), ids, np.arange(len(ids)))
                         for ids in group]
                model.runner.run(parts, "hidden")
    return repeat * len(rows) / (time.perf_counter() - begin)


def random_model(shape: str, kind: str, threads: int):
    """A model (engine.model.Model) of random weights of that type and of no tokenizer."""
    from numflow import network
    from numflow.cpu.program import Program
    from numflow.engine.model import Model
    from numflow.lab.shapes import find_shape, random_network

    built, checkpoint = random_network(find_shape(shape), kind)
    return Model(built, Program(built, network.WeightSource(built, checkpoint), threads=threads), ends=frozenset())


def synthetic(lab, samples: Samples, shape: str, kind: str, threads: int) -> None:
    """A large model of random weights: decoding beside the memory's bandwidth, prefill beside the int8 peak."""
    key = ("synthetic", f"{shape} {kind}", threads)
    if not samples.missing(*key, "decode"):
        return
    from numflow.cpu.measure.roofline import measure_limits
    from numflow.engine.measure.profile import cost
    from numflow.network.cost import Workload

    engine = random_model(shape, kind, threads)
    built, program = engine.network, engine.program
    linears = [step for step in built.entries["main"] if step.op == "linear"]
    read = sum(program.weight_bytes(step.weights["weight"]) for step in linears)
    work = sum(cost(step, built, program, Workload(1, PROMPT)).int8 for step in linears) / PROMPT
    rng, above = np.random.default_rng(0), []
    for _ in range(4 * samples.rounds):
        if not samples.missing(*key, "decode"):
            break
        limits = measure_limits(threads)
        ids = rng.integers(0, engine.vocabulary, PROMPT).tolist()
        prefill = engine.generate(ids, max_tokens=1, ignore_eos=True).stats["prefill_tok_s"]
        decode = engine.generate(ids[:8], max_tokens=STEPS + 1, ignore_eos=True).stats["decode_tok_s"]
        found = {"of int8 peak": prefill * work / 1e9 / limits.int8_gop_s,
                 "of bandwidth": decode * read / 1e9 / limits.read_gb_s, "prefill": prefill, "decode": decode}
        if max(found["of int8 peak"], found["of bandwidth"]) > 1:
            samples.note(1 + (samples.of(*key, "left out") or [0])[0], *key, "left out")
            above.append(found)
            continue  # the limit was measured in a worse moment than the speed: a share of it means nothing
        _add(samples, key, found)
    # Where most rounds exceed a limit, the kernel that measures the limit is slower than the model's kernels.
    for found in above:
        if samples.missing(*key, "decode"):
            _add(samples, key, found)
    samples.note(read, *key, "bytes")
    engine.close()
    _say(lab, samples, key, ("of int8 peak", "of bandwidth"))


def _add(samples: Samples, key: tuple, found: dict[str, float]) -> None:
    for what, value in found.items():
        samples.add(value, *key, what)


def start(lab, samples: Samples, peer: LlamaCpp | None, subject: Subject, threads: int) -> None:
    """Seconds from a process's start to its first token, and the peak of its memory: of the command line."""
    key = ("start", subject.name, threads)
    command = [sys.executable, "-m", "numflow", "bench", "-m", str(subject.path), "--json", "--threads", str(threads),
               "--repeat", "1", "--gen-tokens", str(STEPS), "--prompt-tokens", str(PROMPT),
               *(["--activations", subject.activations] if subject.activations else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or every start compiles all of Python's sources
    for _ in range(2 * samples.rounds):
        if not samples.missing(*key, "first token"):
            break
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        result = json.loads(out)
        if result["compile_s"] > 0:
            continue  # a first start
        if peer:
            peer.bench(subject.path, threads, "-p", PROMPT, "-n", STEPS)
            samples.add(peer.peak_mib, *key, "peer memory")
        samples.add(result["peak_rss_mib"], *key, "memory")
        samples.add(result["weights_bytes"] / 2**20, *key, "weights")
        samples.add(result["first_token_s"], *key, "first token")
    _say(lab, samples, key, ("first token", "memory"))


def _say(lab, samples: Samples, key: tuple, what: tuple[str, ...]) -> None:
    found = []
    for name in what:
        ours, theirs = samples.of(*key, name), samples.of(*key, f"peer {name}")
        found.append(f"{name} {np.median(ours):.3g}" + (f" beside {np.median(theirs):.3g}" if theirs else ""))
    lab.say(f"{time.strftime('%H:%M:%S')} {' '.join(map(str, key))}: {', '.join(found)}")
