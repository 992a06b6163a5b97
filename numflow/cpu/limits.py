"""What this machine can do at most: memory reads, int8 dot products and float32 multiply-adds, measured by the kernels
that a model's work would be if nothing else had to be done. A model's speed is told as a fraction of these."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import types
from numba.extending import intrinsic

from numflow.cpu.arena import Arena
from numflow.cpu.kernel import Call, Kernel, i64, kernel, share
from numflow.cpu.memory import aligned
from numflow.cpu.simd_dot import dot4
from numflow.cpu.simd_isa import isa
from numflow.cpu.simd_tile import repeat
from numflow.cpu.simd_value import Value, constant, fma, load, prefetch, save
from numflow.cpu.threads import shared_threads

READ_BYTES = 256 << 20  # far more than any cache
CHAINS = 12 if isa() == "avx512" else 5  # independent sums: enough to fill the pipeline, and they fit the registers
STEPS = 1 << 20
_LINE, _SINK = 64, 1024  # of memory that results go to, so that no work is left out

# Arguments: address of what is read and how many lines or steps; address of _SINK bytes for each thread.
SOURCE, COUNT, RESULT = range(3)


@dataclass(frozen=True)
class Limits:
    """Of all threads together: 10^9 bytes, int8 operations and float32 operations per second (a multiply-add is 2)."""

    threads: int
    read_gb_s: float
    int8_gop_s: float
    f32_gop_s: float


def _sums(kind: str, count: int, step: Callable) -> object:
    """A function of compiled code (source, steps, result): `count` sums, each changed by `step` once in a round."""
    @intrinsic
    def sums(typingctx, source, steps, result):
        def codegen(context, builder, signature, args):
            source, steps, result = (Value(builder, a) for a in args)
            zeros = [constant(source, kind, 0) for _ in range(count)]
            totals = repeat(steps, zeros, lambda i, vectors: [step(v, source, i, n) for n, v in enumerate(vectors)])
            for n, total in enumerate(totals):
                save(result + _LINE * n, total)
            return context.get_dummy_value()
        return types.void(types.int64, types.int64, types.int64), codegen
    return sums


def _add_line(total: Value, source: Value, i: Value, n: int) -> Value:
    at = source + (i * (8 * _LINE) + n * _LINE)
    prefetch(at + 4096, 1)
    return total + load(at, "i32", 16)


def _add_byte_products(total: Value, source: Value, i: Value, n: int) -> Value:
    # Both sides change, so that no instruction set can have the products once and for all.
    return dot4(total, load(source + _LINE * (n + 1), "u8", 64), load(source + ((i & 15) << 2), "i32"), 4)


def _add_product(total: Value, source: Value, i: Value, n: int) -> Value:
    return fma(load(source + _LINE * (n + 1), "f32", 16), load(source + ((i & 15) << 2), "f32").splat(16), total)


_read_sums = _sums("i32", 8, _add_line)
_byte_sums, _f32_sums = _sums("i32", CHAINS, _add_byte_products), _sums("f32", CHAINS, _add_product)


@kernel
def _read(args, thread, n_threads):
    """COUNT: groups of 8 lines of all threads."""
    begin, end = share(i64(args, COUNT), thread, n_threads)
    _read_sums(i64(args, SOURCE) + begin * 512, end - begin, i64(args, RESULT) + thread * _SINK)


@kernel
def _multiply_bytes(args, thread, n_threads):
    _byte_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * _SINK)


@kernel
def _multiply_f32(args, thread, n_threads):
    _f32_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * _SINK)


def measure_limits(threads: int, read_bytes: int = READ_BYTES, repeat: int = 20) -> Limits:
    """The best of `repeat` short runs each; takes about a quarter of a second of all threads."""
    memory = Arena().zeros(read_bytes)
    memory[:] = 1
    small, sink = aligned((CHAINS + 1) * _LINE, np.uint8), aligned(threads * _SINK, np.uint8)
    per_step = CHAINS * threads * STEPS / 1e9
    seconds = [_best(kernel, threads, repeat, source, count, sink) for kernel, source, count in (
        (_read, memory, read_bytes // (8 * _LINE)), (_multiply_bytes, small, STEPS), (_multiply_f32, small, STEPS))]
    return Limits(threads, read_bytes / 1e9 / seconds[0], 128 * per_step / seconds[1], 32 * per_step / seconds[2])


def _best(fn: Kernel, threads: int, repeat: int, *values) -> float:
    """Seconds of the quickest run."""
    call, pool = Call.of(None, fn, *values), shared_threads(threads)
    table = np.array([[fn.address, call.args.ctypes.data, 1]], np.int64)
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        pool.run(table, 1)
        times.append(time.perf_counter() - begin)
    return min(times)
