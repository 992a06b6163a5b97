"""Whole models: prompts, decoding at several positions of a text, several texts in a batch."""

import time
from pathlib import Path
from statistics import median

import numpy as np

from numflow.executor.contract import DECODE, MOST_STEPS
from numflow.network.windows import CHUNK, STATE
from numflow.ops import Batch
from numflow.quant.state import STATE_TYPES

from ..llama_cpp import LlamaCpp

GAP = 64  # tokens before the first that is counted


class Runner:
    """One text or several texts in a program, without an engine."""

    def __init__(self, path: Path, threads: int, tokens: int, texts: int = 1, **options):
        import numflow

        self.model = numflow.load(path, threads=threads, **options)
        self.program = self.model.program
        blocks = -(-tokens // self.program.block_size)
        self.program.reserve(blocks * texts, windows={STATE: texts})
        self._table = np.arange(blocks * texts, dtype=np.int32).reshape(texts, blocks)
        self._ids = np.random.default_rng(0).integers(0, self.model.vocabulary, tokens, np.int32)

    def run(self, first: int, count: int) -> np.ndarray:
        """Logits of the last of `count` tokens from a position on."""
        positions = np.arange(first, first + count, dtype=np.int32)
        return self.program.run(Batch(self._ids[positions], positions, np.array([0, count], np.int32), self._table[:1],
                                      np.array([count - 1], np.int32), slots=np.array([0], np.int32)))

    def together(self, position: int, tokens: int) -> float:
        """Tokens per second of all texts, each of which decodes from a position on."""
        texts = np.arange(len(self._table), dtype=np.int32)

        def step(at: int) -> None:
            self.program.run(Batch(self._ids[texts % len(self._ids)], np.full_like(texts, at),
                                   np.arange(len(texts) + 1, dtype=np.int32), self._table, texts, slots=texts))

        step(position - 1)
        begin = time.perf_counter()
        for at in range(tokens):
            step(position + at)
        return len(texts) * tokens / (time.perf_counter() - begin)

    def prefill(self, tokens: int) -> float:
        """Tokens per second of a prompt."""
        begin = time.perf_counter()
        for at in range(0, tokens, CHUNK):
            self.run(at, min(CHUNK, tokens - at))
        return tokens / (time.perf_counter() - begin)

    def decode(self, position: int, tokens: int) -> float:
        """Tokens per second of greedy decoding from a position on."""
        self._steps(position - 1, 1)
        begin, at = time.perf_counter(), position
        while at < position + tokens:
            at += self._steps(at, position + tokens - at)
        return tokens / (time.perf_counter() - begin)

    def _steps(self, at: int, most: int) -> int:
        """Run steps from a position on, as many as go in one go and `most` at most; returns how many ran."""
        if DECODE not in self.program.can:
            self.run(at, 1)
            return 1
        steps = min(most, MOST_STEPS, self.program.block_size - at % self.program.block_size)
        first = np.zeros(1, np.int32)
        batch = Batch(self._ids[at:at + 1], first + at, np.array([0, 1], np.int32), self._table[:1], first, slots=first,
                      limits=first + len(self._ids))
        self.program.decode(batch, steps)
        return steps


def beside(peer: LlamaCpp, path: Path, threads: int, prompts: list[int], position: int, tokens: int, texts: int,
           rounds: int) -> dict:
    """Samples of prompts, of decoding, and of so many texts together, tokens per second; the engines take turns. The
    machine's limits are measured before each round."""
    from numflow.cpu.measure.roofline import measure_limits

    own = Runner(path, threads, max(*prompts, position + tokens) + 1)
    several = Runner(path, threads, position + tokens, texts)
    work = {f"prefill {n}": (lambda n=n: own.prefill(n), lambda n=n: peer.prefill(path, threads, n))
            for n in prompts}
    work["decode"] = (lambda: own.decode(position, tokens),
                      lambda: peer.decode(path, threads, position, tokens))
    work[f"decode, {texts} texts"] = (lambda: several.together(position, tokens),
                                      lambda: peer.batched(path, threads, texts, position, tokens))
    own.run(0, 16)
    samples: dict = {}
    limits = []
    for _ in range(rounds):
        limits.append(measure_limits(threads))
        for name, (ours, theirs) in work.items():
            samples.setdefault(name, []).append(ours())
            if peer:
                samples.setdefault(f"llama.cpp {name}", []).append(theirs())
    weights = own.program.weights_bytes
    own.model.close()
    several.model.close()
    return {"samples": samples, "weights_bytes": weights, "read_gb_s": [each.read_gb_s for each in limits],
            "int8_gop_s": [each.int8_gop_s for each in limits]}


def by_position(path: Path, threads: int, positions: list[int], tokens: int, rounds: int) -> dict:
    """Tokens per second at each position, which take turns: the median of rounds."""
    own = Runner(path, threads, max(positions) + tokens)
    samples = {position: [] for position in positions}
    for _ in range(rounds):
        for position, values in samples.items():
            values.append(own.decode(position, tokens))
    own.model.close()
    return {str(position): {"tok_s": median(values), "samples": values} for position, values in samples.items()}


def by_type(path: Path, threads: int, text: int, position: int, tokens: int) -> list[dict]:
    """Of each type: bytes of a slot, what changes in the logits after a text, in their standard deviations, and the
    rate of decoding."""
    found, exact = [], None
    for dtype in STATE_TYPES:
        own = Runner(path, threads, max(text, position) + tokens, state_type=dtype)
        own.prefill(text - 1)
        logits = np.array(own.run(text - 1, 1), np.float64)
        exact = logits if exact is None else exact
        off = logits - exact
        found.append({"type": dtype, "bytes": own.program.window_bytes[STATE],
                      "rms": float(np.sqrt((off ** 2).mean()) / exact.std()),
                      "largest": float(np.abs(off).max() / exact.std()), "tok_s": own.decode(position, tokens)})
        own.model.close()
    return found
