"""Benchmark of one op for a type and shape: time with its spread, share of this machine's limit, ratio to the last run.

The op runs on several copies of the weights in turn, so that they are read from memory and not from a cache.
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
MOST_BYTES = 128 << 20   # bytes of all copies together: larger than most caches
MOST_COPIES = 64
MOST_WEIGHTS = 1 << 28   # largest matrix
_DRAWN = 32              # random rows; the other rows repeat them


class _Weights:
    """Random weights with the interface of a WeightSource."""

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
    """Measure an op on the CPU. The result is stored, to be compared with the next run of the same case.

    shape: "4096x4096", output rows times input columns; for rms_norm the width only. kind: a tensor type, or a scheme.

    Returns:
        microseconds: spread of `repeat` runs, each the mean over copies. megabytes, operations: of one copy. gb_s,
        gop_s. at_limit: the shortest time that this machine's measured limits allow, divided by the median. last: the
        stored result of the last run, or None. against_last: the last median divided by this median. apart: whether the
        two spreads do not overlap.

    Raises:
        RequestError, FormatError: there is no such op, type or shape.
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
    """Check the arguments; return rows and columns of the matrix."""
    if op not in OPS:
        raise RequestError(f"--op cannot measure {op!r}; ops: {', '.join(OPS)}{did_you_mean(op, OPS)}")
    wanted = r"(\d+)x(\d+)" if op == "linear" else r"(\d+)"
    match = re.fullmatch(wanted, shape)
    if match is None or not all(int(size) for size in match.groups()):
        form = "OUTPUTSxINPUTS, such as 4096x4096" if op == "linear" else "the width, such as 4096"
        raise RequestError(f"--shape should be {form}, is {shape!r}")
    sizes = [int(size) for size in match.groups()]
    rows, columns = sizes if op == "linear" else (sizes[0], sizes[0])
    if (rows * columns if op == "linear" else columns) > MOST_WEIGHTS:
        raise RequestError(f"--shape {shape} has more than {MOST_WEIGHTS} weights")
    if not 1 <= tokens <= 4096:
        raise RequestError(f"--tokens should be 1 .. 4096, is {tokens}")
    return rows, columns


def _network(op: str, kind: str, rows: int, columns: int) -> tuple[Network, dict[str, np.ndarray], int]:
    """A network with a table of random rows and copies of the op after it; the data; the stored bytes of one copy."""
    table = np.random.default_rng(0).standard_normal((4, columns)).astype(np.float32)
    stored = {"table": table.view(np.uint8)}
    if op == "linear":
        tensor_type(kind)  # raises for an unknown type
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
    """Compare with the stored result of the last run of the same case, and replace it on disk."""
    keys = ("op", "type", "shape", "tokens", "threads", "activations")
    path: Path = places.home() / "bench" / ("-".join(str(found[key]) for key in keys).replace("%", "p") + ".json")
    last = None
    try:
        last = json.loads(path.read_text(encoding="utf-8"))
        before, now = last["microseconds"], found["microseconds"]
        against = {"last": last, "against_last": before["median"] / now["median"],
                   "apart": now["max"] < before["min"] or before["max"] < now["min"]}
    except (OSError, ValueError, KeyError, TypeError):  # there is no readable result of an earlier run
        against = {"last": None, "against_last": None, "apart": None}
    try:
        places.make(path.parent)
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}: the result cannot be stored for the next run") from None
    return against
