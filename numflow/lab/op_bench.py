"""One op on matrices of a given type and shape: time with its spread, share of this machine's limit, and the last run.

The op runs on several copies one after the other, so that weights come from memory and not from a cache.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from numflow import places
from numflow.engine.measure.bench_runs import spread
from numflow.engine.measure.host import load_average
from numflow.errors import RequestError, did_you_mean
from numflow.formats.types import tensor_type
from numflow.lab.shapes import encoded
from numflow.network.weights.source import RawMatrix
from numflow.ops import Batch, Buffer, Network, Step, View, Weight

OPS = ("linear", "rms_norm")
MOST_BYTES = 128 << 20   # of all copies together: more than most caches hold
MOST_COPIES = 64
MOST_WEIGHTS = 1 << 28   # of one matrix
_DRAWN = 32              # rows that are drawn; the others repeat them


class _Weights:
    """Random weights by name, in place of a WeightSource."""

    def __init__(self, network: Network, stored: Mapping[str, np.ndarray]):
        self._network, self._stored = network, stored

    def raw(self, name: str) -> RawMatrix:
        weight = self._network.weights[name]
        n, k = weight.shape
        return RawMatrix(name, weight.types[0], self._stored[weight.name.partition(".")[0]], (n, k))

    def f32(self, name: str) -> np.ndarray:
        weight = self._network.weights[name]
        return self._stored[weight.name.partition(".")[0]].view(np.float32).reshape(weight.shape)


def bench_op(op: str, kind: str, shape: str, tokens: int, repeat: int = 20, threads: int | None = None,
             activations: str = "int8", say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measurements of an op on the CPU, kept for the next run of the same to be compared with.

    shape: "4096x4096", outputs times inputs; of rms_norm the width alone. kind: a tensor type, or a scheme of ours.

    Returns:
        microseconds: spread of `repeat` runs, each the mean over copies; megabytes and operations of one; gb_s, gop_s;
        at_limit: least time at this machine's measured limits divided by the median; last: the run before, or None;
        against_last: last median divided by this one's, and apart: whether the two spreads have nothing in common.

    Raises:
        RequestError, FormatError: no such op, type or shape.
    """
    from numflow.cpu.measure.roofline import measure_limits
    from numflow.cpu.program import Program

    rows, columns = _sizes(op, shape, tokens)
    network, stored, nbytes = _network(op, kind, rows, columns)
    copies = len(network.entries["main"]) - 2
    say(f"{copies} copies of {nbytes / 1e6:.2f} MB")
    program = Program(network, _Weights(network, stored), activations=activations, threads=threads, rows=max(tokens, 1))
    try:
        limits = measure_limits(program.threads)
        batch = _batch(tokens)
        runs = [sum(row.microseconds for row in program.trace(batch) if row.label.startswith("bench.")) / copies
                for _ in range(repeat + 2)][2:]
        arithmetic = program.arithmetic(network.entries["main"][1])
        moved = program.weight_bytes("w.0") + 4 * tokens * (rows + columns)
        found: dict[str, Any] = {
            "op": op, "type": kind, "shape": shape, "tokens": tokens, "threads": program.threads,
            "activations": program.activations, "copies": copies, "microseconds": spread(runs),
            "megabytes": moved / 1e6, "operations": 2.0 * rows * columns * tokens if op == "linear" else 0.0,
            "limits": asdict(limits), "load": load_average()}
    finally:
        program.close()
    median = found["microseconds"]["median"]
    found["gb_s"], found["gop_s"] = moved / median / 1e3, found["operations"] / median / 1e3
    peak = {"int8": limits.int8_gop_s, "bf16": limits.bf16_gop_s, "f32": limits.f32_gop_s}[arithmetic]
    found["at_limit"] = max(moved / limits.read_gb_s, found["operations"] / peak) / 1e3 / median
    return found | _against_last(found)


def _sizes(op: str, shape: str, tokens: int) -> tuple[int, int]:
    """Rows and columns of the matrix; checked."""
    if op not in OPS:
        raise RequestError(f"no op {op!r} to measure alone; there are {', '.join(OPS)}{did_you_mean(op, OPS)}")
    wanted = r"(\d+)x(\d+)" if op == "linear" else r"(\d+)"
    match = re.fullmatch(wanted, shape)
    if match is None or not all(int(size) for size in match.groups()):
        form = "OUTPUTSxINPUTS, as 4096x4096" if op == "linear" else "the width, as 4096"
        raise RequestError(f"--shape should be {form}, is {shape!r}")
    sizes = [int(size) for size in match.groups()]
    rows, columns = sizes if op == "linear" else (sizes[0], sizes[0])
    if (rows * columns if op == "linear" else columns) > MOST_WEIGHTS:
        raise RequestError(f"--shape {shape} has more than {MOST_WEIGHTS} weights")
    if not 1 <= tokens <= 4096:
        raise RequestError(f"--tokens should be 1 .. 4096, is {tokens}")
    return rows, columns


def _network(op: str, kind: str, rows: int, columns: int) -> tuple[Network, dict[str, np.ndarray], int]:
    """Copies of the op behind a table of random rows, their data, and the stored bytes of one."""
    table = np.random.default_rng(0).standard_normal((4, columns)).astype(np.float32)
    stored = {"table": table.view(np.uint8)}
    if op == "linear":
        tensor_type(kind)  # names a wrong one
        drawn = np.random.default_rng(1).standard_normal((min(rows, _DRAWN), columns), np.float32)
        raw = encoded(drawn / np.float32(columns) ** 0.5, kind)
        stored["w"] = np.ascontiguousarray(raw[np.arange(rows) % len(raw)])
        shape: tuple[int, ...] = (rows, columns)
    else:
        kind, shape = "F32", (columns,)
        stored["w"] = np.ones((1, columns), np.float32).view(np.uint8)
    nbytes = stored["w"].nbytes
    copies = max(2, min(MOST_COPIES, -(-MOST_BYTES // nbytes)))
    weights = {"table": Weight("table", table.shape, types=("F32",))}
    weights |= {f"w.{i}": Weight(f"w.{i}", shape, types=(kind,)) for i in range(copies)}
    buffers = {"x": Buffer("x", "tokens", columns), "y": Buffer("y", "tokens", rows),
               "out": Buffer("out", "logits", rows)}
    x, y, out = (View(name, 0, buffers[name].width) for name in ("x", "y", "out"))
    params: dict[str, Any] = {} if op == "linear" else {"eps": 1e-5}
    steps = (Step("embed", (), (x,), {"table": "table"}, {}, "table"),
             *(Step(op, (x,), (y,), {"weight": f"w.{i}"}, params, f"bench.{i}") for i in range(copies)),
             Step("select_rows", (y,), (out,), {}, {}, "out"))
    return Network("bench", {"main": steps}, buffers, weights, {}, {"logits": out}, {"type": "decoder"}), stored, nbytes


def _batch(tokens: int) -> Batch:
    ids = np.arange(tokens, dtype=np.int32)
    return Batch(tokens=ids % 4, positions=ids, starts=np.array([0, tokens], np.int32),
                 blocks=np.zeros((1, 0), np.int32), logit_rows=ids[-1:])


def _against_last(found: dict[str, Any]) -> dict[str, Any]:
    """The last run of the same, and this one beside it; this one takes its place on disk."""
    keys = ("op", "type", "shape", "tokens", "threads", "activations")
    path: Path = places.home() / "bench" / ("-".join(str(found[key]) for key in keys).replace("%", "p") + ".json")
    last = None
    try:
        last = json.loads(path.read_text(encoding="utf-8"))
        before, now = last["microseconds"], found["microseconds"]
        against = {"last": last, "against_last": before["median"] / now["median"],
                   "apart": now["max"] < before["min"] or before["max"] < now["min"]}
    except (OSError, ValueError, KeyError, TypeError):  # there is none that can be read: this is the first
        against = {"last": None, "against_last": None, "apart": None}
    try:
        places.make(path.parent)
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}: the measurement is not kept for the next run") from None
    return against
