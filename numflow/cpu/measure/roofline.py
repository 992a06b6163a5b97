"""Roofline of this machine: rates of memory reads, int8 dot products, and float32 and bfloat16 multiply-adds.

The kernels of these measurements use the instructions of a model's kernels and do no other work. A model's speed is
reported as a fraction of the rates.
"""

import time
from dataclasses import dataclass

import numpy as np

from numflow.cpu.memory.arena import Arena
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, Kernel
from numflow.cpu.runtime.threads import shared_threads
from numflow.cpu.simd.isa import isa

_CODE = Code("numflow.cpu.measure.roofline_kernels")

READ_BYTES = 256 << 20  # far more than any cache
CHAINS = 12 if isa() == "avx512" else 5  # independent accumulators: they fill the pipeline and fit the registers
STEPS = 1 << 20
STREAMS = 4  # of 2 lines an iteration, as many lines as `read` has with one stream
LINE, SINK = 64, 1024  # bytes of results, per accumulator and per thread; stored so that no work is optimised away


@dataclass(frozen=True)
class Roofline:
    """Rates of all threads together: 10^9 bytes, int8, float32 and bfloat16 operations per second (a multiply-add is
    2 operations)."""

    threads: int
    read_gb_s: float
    int8_gop_s: float
    f32_gop_s: float
    bf16_gop_s: float


def measure_limits(threads: int, read_bytes: int = READ_BYTES, repeat: int = 20) -> Roofline:
    """Measure each rate as the best of `repeat` short runs; takes about a third of a second on all threads.

    Reads are the faster of two forms: one stream of a thread with software prefetch, or four without. With one thread,
    a Zen 3 reads 19 and 28 GB/s.
    """
    memory = Arena().zeros(read_bytes)
    memory[:] = 1
    small, sink = aligned((CHAINS + 1) * LINE, np.uint8), aligned(threads * SINK, np.uint8)
    small.view(np.float32)[:] = 0.5  # emulated fused multiply-adds take longer with zeros
    per_step = CHAINS * threads * STEPS / 1e9
    runs = [*((name, memory, read_bytes // (8 * LINE)) for name in ("read", "read_streams")),
            *((f"multiply_{kind}", small, STEPS) for kind in ("bytes", "f32", "bf16"))]
    read, streams, int8, f32, bf16 = (_best(_CODE.kernel(name), threads, repeat, source, count, sink)
                                      for name, source, count in runs)
    return Roofline(threads, read_bytes / 1e9 / min(read, streams), 128 * per_step / int8, 32 * per_step / f32,
                    64 * per_step / bf16)


def _best(fn: Kernel, threads: int, repeat: int, *values) -> float:
    """Seconds of the fastest run."""
    call, pool = Call.of(None, fn, *values), shared_threads(threads)
    table = np.array([[fn.address, call.args.ctypes.data, 1]], np.int64)
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        pool.run(table, 1)
        times.append(time.perf_counter() - begin)
    return min(times)
