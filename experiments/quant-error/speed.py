"""Speed of `linear` on the CPU for every width: decoding against the memory's speed, and prefill in operations.

A set of matrices larger than any cache is multiplied by one token (every byte of codes and headers is read once) or by
a prompt. The bits are random, because the speed does not depend on them. All widths read their codes from the same
memory and take turns, each right after a plain read of that memory. The result is the best round, and the median of the
rounds' shares of the plain reads, because the memory bandwidth of a machine changes over time. A matrix that fits the
L2 cache, multiplied again and again, shows the speed of the instructions alone: if it is above the memory bandwidth,
decoding is memory-bound.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from numflow.cpu.bind import Bound
from numflow.cpu.context import Context
from numflow.cpu.memory.arena import Arena
from numflow.cpu.runtime.cores import default_threads
from numflow.cpu.runtime.kernel import N_TOKENS
from numflow.cpu.runtime.threads import shared_threads
from numflow.cpu.simd.isa import isa
from numflow.cpu.weights.layout import ROWS, SCHEMES, Packed
from numflow.ops import Buffer, Network, Step, View, Weight
from numflow.quant.hub_types import SIZES
from numflow.quant.layout import ROW_SCHEMES
from numflow.quant.stored import FACTORED, SCALED, STORED, SUPER

QUICK = ("q3h", "q4", "Q4_0")  # compiling takes its time
PEERS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")  # file types that are kept as they are, for comparison


def speed_table(quick: bool = False, types: tuple[str, ...] = (*ROW_SCHEMES, *PEERS), threads: int | None = None,
                mebibytes: int = 1024, columns: int = 4096, rounds: int = 5, tokens: int = 128) -> list[dict]:
    """One row for each type:

    type, bits_per_weight (in memory), bytes (of the matrices), decode_gb_s and decode_fraction (of the plain reads),
    cached_gb_s (of a matrix in the cache), decode_gweights_s, prefill_gop_s (2 operations for each weight and token),
    read_gb_s (the slowest and the fastest plain read), threads.
    """
    if quick:
        mebibytes, columns, rounds, tokens = 8, 512, 1, 16
        types = tuple(kind for kind in types if kind in QUICK)
    threads = threads or default_threads()
    memory = _random(mebibytes << 20)
    sets = {kind: _matrices(kind, memory, columns) for kind in types}
    small = {kind: _matrices(kind, memory[:4 << 20], columns // 4)[:1] * 512 for kind in types}
    decode = {kind: _Walk(matrices, 1, threads) for kind, matrices in sets.items()}
    cached = {kind: _Walk(matrices, 1, threads) for kind, matrices in small.items()}
    prefill = {kind: _Walk(matrices[:max(1, len(matrices) // 32)], tokens, threads) for kind, matrices in sets.items()}
    read, best, shares = [], {}, {kind: [] for kind in types}
    for _ in range(rounds):
        for kind in types:
            read.append(_read_seconds(memory, threads) / memory.nbytes)
            for walk in (decode[kind], cached[kind], prefill[kind]):
                seconds = walk.seconds()
                best[walk] = min(best.get(walk, np.inf), seconds)
                if walk is decode[kind]:
                    shares[kind].append(read[-1] / (seconds / walk.nbytes))
    rows = []
    for kind, walk in decode.items():
        gb_s, cached_gb_s = (w.nbytes / best[w] / 1e9 for w in (walk, cached[kind]))
        rows.append({"type": kind, "bits_per_weight": 8 * walk.nbytes / walk.weights, "bytes": walk.nbytes,
                     "decode_gb_s": gb_s, "decode_fraction": float(np.median(shares[kind])), "cached_gb_s": cached_gb_s,
                     "decode_gweights_s": walk.weights / best[walk] / 1e9,
                     "prefill_gop_s": 2 * tokens * prefill[kind].weights / best[prefill[kind]] / 1e9,
                     "read_gb_s": [1e-9 / max(read), 1e-9 / min(read)], "threads": threads})
    return rows


def _random(nbytes: int) -> np.ndarray:
    """uint8 [nbytes], which repeats after a while."""
    some = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    memory = Arena().zeros(nbytes)  # as weights of a model are
    memory[:] = np.resize(some, nbytes)
    return memory


def _matrices(kind: str, memory: np.ndarray, columns: int) -> list[Packed]:
    """As many square matrices as the memory has codes for."""
    scheme = SCHEMES[STORED[kind].kind.name]
    code_bytes, head_bytes = (columns // ROWS * size for size in scheme.tile_bytes(columns))
    headers, arena = _headers(scheme, columns), Arena()
    starts = range(0, len(memory) - code_bytes - head_bytes + 1, code_bytes + head_bytes)
    matrices = [Packed(scheme.name, kind, (columns, columns), 1, memory[start:start + code_bytes],
                       arena.zeros(len(headers))) for start in (start // 64 * 64 for start in starts)]
    for matrix in matrices:
        matrix.headers[:] = headers
    return matrices


def _headers(scheme, columns: int) -> np.ndarray:
    """Headers of a square matrix whose weights are ordinary numbers."""
    tiles, size = columns // ROWS, scheme.tile_bytes(columns)[1]
    if scheme.is_own:
        headers = np.random.default_rng(1).integers(0, 256, (tiles, size), dtype=np.uint8)
        rows = np.full((tiles, ROWS), 360 << 7 | 8 << 2, np.uint16)
        headers[:, :2 * ROWS] = rows.view(np.uint8)
        return headers.reshape(-1)
    if scheme.header in (SCALED, FACTORED):
        return np.tile(_of_hub(scheme, size), tiles)
    headers = np.full(tiles * size, 1, np.uint8).reshape(-1, 2)
    headers[:, 1] = 0x20 if scheme.header < SUPER else 1  # float16 of some 2^-7
    return headers.reshape(-1)


def _of_hub(scheme, size: int) -> np.ndarray:
    """The same of a tile of a hub's type: scales of 2^-7, zeros in the middle of the codes, floats of 16 columns of 1.

    Scales that were too small for float32 would make kernels slow.
    """
    middle = {"U8": 1 << int(scheme.bits) - 1, "F16": 0x4800, "BF16": 0x4100, "": 0}[scheme.zeros]
    bits = {"F16": 0x2000, "BF16": 0x3C00}.get(scheme.scale, 0x3C000000)
    scales = np.full(ROWS, bits, f"<u{SIZES[scheme.scale or 'F32']}")
    if scheme.header == FACTORED:
        return np.concatenate([scales.view("u1"), np.full(size - scales.nbytes, 0x38, np.uint8)])
    zeros = np.full(ROWS, middle, f"<u{SIZES[scheme.zeros]}").view("u1") if scheme.zeros else np.zeros(0, np.uint8)
    return np.tile(np.concatenate([scales.view("u1"), zeros]), size // scheme.header_bytes)


class _Walk:
    """`linear` of some tokens with one matrix after the other."""

    def __init__(self, matrices: list[Packed], tokens: int, threads: int):
        columns = matrices[0].shape[1]
        self.nbytes, self.weights = sum(m.nbytes for m in matrices), len(matrices) * columns * columns
        names = [f"m{i}" for i in range(len(matrices))]
        x, y = View("x", 0, columns), View("y", 0, columns)
        steps = tuple(Step("linear", (x,), (y,), {"weight": name}, {}, name) for name in names)
        matrix = Weight("", (columns, columns), types=(matrices[0].type,))
        network = Network("speed", {"main": steps}, {b: Buffer(b, "tokens", columns) for b in ("x", "y")},
                          {name: replace(matrix, name=name) for name in names}, {}, {"hidden": y}, {})
        weights = _Weights(dict(zip(names, matrices, strict=True)))
        self._ctx = Context(network, weights, {}, {"tokens": tokens, "logits": 1, "routes": 1}, "int8", threads)
        self._ctx.buffers.arrays["x"][:] = np.random.default_rng(2).standard_normal((tokens, columns))
        self._ctx.header_fields[N_TOKENS] = tokens
        self._bound, self._threads = Bound(steps, self._ctx), shared_threads(threads)
        self._bound.compile(lambda kernel: None)

    def seconds(self) -> float:
        """Time of one pass."""
        begin = time.perf_counter()
        self._threads.run(self._bound.table, len(self._bound.table))
        return time.perf_counter() - begin


class _Weights:
    """Weights of a Context, packed already."""

    spread = False

    def __init__(self, matrices: dict[str, Packed]):
        self.packed, self.vector = matrices.__getitem__, None


def _read_seconds(memory: np.ndarray, threads: int) -> float:
    """Time to read all of the memory."""
    parts = np.array_split(memory.view(np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        list(pool.map(np.max, parts))
        return time.perf_counter() - begin


if __name__ == "__main__":  # speeds.py, for another instruction set
    print(json.dumps({"isa": isa(), "rows": speed_table(**json.loads(sys.argv[1]))}))
