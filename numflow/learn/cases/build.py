"""Tiny networks around one op, which the Program of every executor can run.

A network takes its inputs from a table of random rows (op `embed`), applies the op under test and selects rows. The
inputs of an op are columns of one buffer, so ops get column views. Weights are float32 where no type is given.
"""

from dataclasses import dataclass, field

import numpy as np

from numflow.network import check_step
from numflow.network.weights.source import RawMatrix
from numflow.ops import OPS, Batch, Buffer, Cache, Network, State, Step, View, Weight

VOCABULARY = 97


class FakeWeights:
    """Arrays with the interface of a WeightSource."""

    def __init__(self, arrays, network_weights):
        self.arrays = arrays
        self.weights = network_weights

    def f32(self, name):
        return self.arrays[name]

    def raw(self, name):
        array, weight = self.arrays[name], self.weights[name]
        rows = array.reshape(1 if array.ndim == 1 else len(array), -1).view(np.uint8)
        return RawMatrix(name, weight.types[0], rows, weight.shape, weight.groups)


@dataclass(frozen=True)
class CaseRun:
    """One call of Program.run. sequences[b]: the sequence of the case that sequence b of the batch is."""

    batch: Batch
    entry: str
    output: str | None
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A test case of one op with one shape.

    schedule: the new tokens of each sequence in every run: ((sequence, count), ...).
    bound:    largest allowed absolute difference, relative to the standard deviation of the expected output.
    rows:     the logit rows of each batch, None for all rows.
    encoder:  length of each sequence's encoder memory, if there is an "encode" entry (which runs first).
    types:    whether batches have token types.
    limits:   Batch.limits of each sequence; () for none.
    """

    name: str
    network: Network
    weights: FakeWeights
    schedule: tuple[tuple[tuple[int, int], ...], ...]
    bound: float = 1e-5
    rows: tuple[int, ...] | None = None
    encoder: tuple[int, ...] = ()
    types: bool = False
    limits: tuple[int, ...] = ()

    def __str__(self):
        return self.name

    def blocks(self, block_size):
        """Number of KV blocks to reserve: 5 more than are used, so that block ids have gaps."""
        return sum(len(t) for t in self._tables(self._totals(), block_size)) + 5

    def cross_blocks(self, block_size):
        return sum(len(t) for t in self._tables(dict(enumerate(self.encoder)), block_size)) + 3

    def runs(self, block_size) -> list[CaseRun]:
        """The batches for a program with this block size. Block tables are shuffled."""
        rng = np.random.default_rng(len(self.name))
        # The encoder's sequences use the same block ids as the decoder's, in other caches.
        totals = self._totals()
        table = self._shuffled(totals, block_size, self.blocks(block_size))
        cross = self._shuffled(dict(enumerate(self.encoder)), block_size, self.cross_blocks(block_size))
        runs, seen = [], dict.fromkeys(totals, 0)
        if self.encoder:
            parts = tuple(enumerate(self.encoder))
            runs.append(self._run(parts, dict.fromkeys(totals, 0), table, cross, rng, "encode"))
        for parts in self.schedule:
            runs.append(self._run(parts, seen, table, cross, rng, "main"))
            seen = {s: seen[s] + dict(parts).get(s, 0) for s in seen}
        return runs

    def _run(self, parts, seen, table, cross, rng, entry):
        total = sum(count for _, count in parts)
        sequences = tuple(s for s, _ in parts)
        rows = range(total) if self.rows is None else self.rows
        batch = Batch(
            tokens=rng.integers(0, VOCABULARY, total, dtype=np.int32),
            positions=np.concatenate([seen[s] + np.arange(n) for s, n in parts]).astype(np.int32),
            starts=np.cumsum([0] + [n for _, n in parts]).astype(np.int32),
            blocks=table[list(sequences)],
            logit_rows=np.array(rows if entry == "main" else [], np.int32),
            types=rng.integers(0, 2, total, dtype=np.int32) if self.types else None,
            cross_blocks=cross[list(sequences)] if self.encoder else None,
            cross_lengths=np.array([self.encoder[s] for s in sequences], np.int32) if self.encoder else None,
            limits=np.array([self.limits[s] for s in sequences], np.int32) if self.limits else None,
            slots=np.array([4 - s for s in sequences], np.int32) if self.network.states else None,
        )
        return CaseRun(batch, entry, "logits" if entry == "main" else None, sequences)

    def _totals(self):
        totals = dict(enumerate(self.encoder))
        counts = {}
        for parts in self.schedule:
            for s, n in parts:
                counts[s] = counts.get(s, 0) + n
        return {s: max(n, totals.get(s, 0)) for s, n in counts.items()}

    @staticmethod
    def _tables(lengths, block_size):
        return [range(-(-n // block_size)) for _, n in sorted(lengths.items())]

    def _shuffled(self, lengths, block_size, blocks):
        """Block tables i32 [sequences, M] with ids in random order, padded with -1."""
        sizes = [len(t) for t in self._tables(lengths, block_size)]
        free = iter(np.random.default_rng(blocks).permutation(blocks).tolist())
        table = np.full((len(sizes), max(sizes, default=0)), -1, np.int32)
        for row, size in zip(table, sizes, strict=True):
            row[:size] = [next(free) for _ in range(size)]
        return table


@dataclass
class CaseBuilder:
    """Builder of a tiny network. Random weights come from a generator that is seeded by the name."""

    name: str
    steps: dict = field(default_factory=lambda: {"main": []})
    buffers: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    arrays: dict = field(default_factory=dict)
    caches: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)

    def __post_init__(self):
        self.rng = np.random.default_rng(sum(map(ord, self.name)))

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def weight(self, role, array, groups=1, kind="F32", shape=None):
        """Add a weight and return its name. For a type `kind` other than F32, `array` has the bytes [N, row_bytes] of a
        matrix of this shape."""
        name = f"{role}.{len(self.weights)}"
        self.arrays[name] = np.ascontiguousarray(array)
        self.weights[name] = Weight(name, shape or array.shape, groups=groups, types=(kind,))
        return name

    def buffer(self, width, rows="tokens", dtype="f32"):
        """Add a buffer and return the view of all its columns."""
        name = f"b{len(self.buffers)}"
        self.buffers[name] = Buffer(name, rows, width, dtype)
        return View(name, 0, width)

    def cache(self, *, kv_heads, k_dim, v_dim=None, kind="self", prefix=0, every=0):
        name = f"cache.{len(self.caches)}"
        self.caches[name] = Cache(name, kv_heads, k_dim, 0 if prefix else v_dim or k_dim, kind, prefix, every)
        return name

    def state(self, *shape, axis=0):
        name = f"state.{len(self.states)}"
        self.states[name] = State(name, shape, axis)
        return name

    def step(self, op, inputs, outputs, weights=None, entry="main", **params):
        label = f"{entry}.{len(self.steps.setdefault(entry, []))}"
        self.steps[entry].append(Step(op, tuple(inputs), tuple(outputs), weights or {}, params, label))

    def inputs(self, *widths, entry="main", spread=1.0):
        """Add a buffer with a random row per token; return column views of these widths, with gaps between them."""
        gap = 4
        whole = self.buffer(sum(widths) + gap * (len(widths) - 1))
        table = self.weight("table", np.float32(spread) * self.normal(VOCABULARY, whole.width))
        self.step("embed", (), (whole,), {"table": table}, entry)
        starts = np.cumsum([0] + [w + gap for w in widths[:-1]]).tolist()
        return [View(whole.buffer, start, width) for start, width in zip(starts, widths, strict=True)]

    def case(self, y, schedule=(((0, 5),),), **options) -> Case:
        """Add the selection of y's logit rows, if y has rows of tokens, and build the Case."""
        if self.buffers[y.buffer].rows == "tokens":
            out = self.buffer(y.width, "logits")
            self.step("select_rows", (y,), (out,))
            y = out
        network = Network(self.name, {k: tuple(v) for k, v in self.steps.items()}, self.buffers, self.weights,
                          self.caches, {"logits": y}, {"type": "decoder"}, self.states)
        for steps in network.entries.values():
            for step in steps:
                assert step.op in OPS
                check_step(step, network)
        return Case(self.name, network, FakeWeights(self.arrays, self.weights), tuple(schedule), **options)


def run_case(case, program_class, **options):
    """Run a case and return the outputs of all runs that have one, float32 [R, N] each."""
    program = program_class(case.network, case.weights, **options)
    try:
        program.reserve(case.blocks(program.block_size), case.cross_blocks(program.block_size) if case.encoder else 0)
        results = [program.run(r.batch, r.entry, r.output) for r in case.runs(program.block_size)]
        return [np.array(y) for y in results if y is not None]
    finally:
        program.close()


def error(actual, expected):
    """Largest absolute difference, relative to the standard deviation of the expected array."""
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    assert actual.dtype == np.float32
    return float(np.max(np.abs(actual - expected)) / max(np.std(expected), 1e-3))


def difference(actual, expected, bound):
    """A sentence with the first element that differs by more than `bound` (in units of `error`), both values, and the
    number of wrong elements."""
    off = np.abs(actual - expected) / max(np.std(expected), 1e-3)
    wrong = ~(off < bound)
    if not wrong.any():
        return "no number differs"
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    rows = wrong.reshape(len(wrong), -1).any(axis=1) if wrong.ndim else wrong.reshape(1)
    return (f"at {list(map(int, index))} of {list(actual.shape)}: got {actual[index]:.6g}, expected "
            f"{expected[index]:.6g}, off by {off[index]:.2g} (allowed {bound:g}); {int(wrong.sum())} of {wrong.size} "
            f"numbers are wrong, in {int(rows.sum())} of {len(rows)} rows")
