"""Kernels that only read memory or only multiply (roofline.py)."""

from collections.abc import Callable

from numba import types
from numba.extending import intrinsic

from numflow.cpu.measure.roofline import CHAINS, LINE, SINK, STREAMS
from numflow.cpu.runtime.access import i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.bfloat16 import add_pair_products
from numflow.cpu.simd.dot import dot4
from numflow.cpu.simd.tile import add_products, each_word, repeat
from numflow.cpu.simd.value import Value, constant, load, prefetch, save

# Arguments: address of the source, number of lines or steps, address of SINK bytes per thread.
SOURCE, COUNT, RESULT = range(3)


def _sums(kind: str, count: int, step: Callable) -> object:
    """A function of compiled code (source, steps, result): `count` accumulators, updated by `step` in each iteration.
    """
    @intrinsic
    def sums(typingctx, source, steps, result):
        def codegen(context, builder, signature, args):
            source, steps, result = (Value(builder, a) for a in args)
            zeros = [constant(source, kind, 0) for _ in range(count)]
            for n, total in enumerate(repeat(steps, zeros, lambda i, totals: step(totals, source, i, steps))):
                save(result + LINE * n, total)
            return context.get_dummy_value()
        return types.void(types.int64, types.int64, types.int64), codegen
    return sums


def _add_lines(totals: list[Value], source: Value, i: Value, steps: Value) -> list[Value]:
    lines = [source + (i * (8 * LINE) + n * LINE) for n in range(8)]
    for line in lines:
        prefetch(line + 4096, 1)
    return _added(totals, lines)


def _add_streams(totals: list[Value], source: Value, i: Value, steps: Value) -> list[Value]:
    """Two lines of each of STREAMS streams, which the hardware prefetches side by side."""
    for stream in range(STREAMS):
        begin = source + (steps * stream + i) * (2 * LINE)
        totals = _added(totals, [begin, begin + LINE])
    return totals


def _added(totals: list[Value], lines: list[Value]) -> list[Value]:
    """Add each line to the accumulator whose turn it is."""
    for n, line in enumerate(lines):
        totals[n % len(totals)] += load(line, "i32", 16)
    return totals


# As in a register tile of several tokens, an iteration loads 16 rows once, and a word per accumulator. Addresses change
# from iteration to iteration, else the compiler would keep the operands in registers that the accumulators need.

def _add_byte_products(totals: list[Value], source: Value, i: Value, steps: Value) -> list[Value]:
    codes = load(source + ((i & 3) << 6), "u8", 64)
    words = each_word(source + ((i & 15) << 2), len(totals))
    return [dot4(total, codes, word, 15) for total, word in zip(totals, words)]


def _add_products(totals: list[Value], source: Value, i: Value, steps: Value) -> list[Value]:
    return add_products(totals, load(source + ((i & 3) << 6), "f32", 16), source + ((i & 15) << 2))


def _add_pair_products(totals: list[Value], source: Value, i: Value, steps: Value) -> list[Value]:
    pairs = load(source + ((i & 3) << 6), "i32", 16)
    words = each_word(source + ((i & 15) << 2), len(totals))
    return [add_pair_products(total, pairs, word) for total, word in zip(totals, words)]


_read_sums, _stream_sums = _sums("i32", 4, _add_lines), _sums("i32", 4, _add_streams)
_byte_sums, _f32_sums = _sums("i32", CHAINS, _add_byte_products), _sums("f32", CHAINS, _add_products)
_bf16_sums = _sums("f32", CHAINS, _add_pair_products)


@kernel
def read(args, thread, n_threads):
    """Read memory. COUNT: groups of 8 cache lines, of all threads together."""
    begin, end = share(i64(args, COUNT), thread, n_threads)
    _read_sums(i64(args, SOURCE) + begin * 512, end - begin, i64(args, RESULT) + thread * SINK)


@kernel
def read_streams(args, thread, n_threads):
    """The same, from STREAMS places of each thread's share at once."""
    begin, end = share(i64(args, COUNT), thread, n_threads)
    _stream_sums(i64(args, SOURCE) + begin * 512, end - begin, i64(args, RESULT) + thread * SINK)


@kernel
def multiply_bytes(args, thread, n_threads):
    _byte_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * SINK)


@kernel
def multiply_f32(args, thread, n_threads):
    _f32_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * SINK)


@kernel
def multiply_bf16(args, thread, n_threads):
    _bf16_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * SINK)
