"""Kernels that do nothing but read or multiply (roofline.py)."""

from collections.abc import Callable

from numba import types
from numba.extending import intrinsic

from numflow.cpu.measure.roofline import CHAINS, LINE, SINK
from numflow.cpu.runtime.access import i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.dot import dot4
from numflow.cpu.simd.tile import repeat
from numflow.cpu.simd.value import Value, constant, fma, load, prefetch, save

# Arguments: address of what is read and how many lines or steps; address of SINK bytes for each thread.
SOURCE, COUNT, RESULT = range(3)


def _sums(kind: str, count: int, step: Callable) -> object:
    """A function of compiled code (source, steps, result): `count` sums, each changed by `step` once in a round."""
    @intrinsic
    def sums(typingctx, source, steps, result):
        def codegen(context, builder, signature, args):
            source, steps, result = (Value(builder, a) for a in args)
            zeros = [constant(source, kind, 0) for _ in range(count)]
            totals = repeat(steps, zeros, lambda i, vectors: [step(v, source, i, n) for n, v in enumerate(vectors)])
            for n, total in enumerate(totals):
                save(result + LINE * n, total)
            return context.get_dummy_value()
        return types.void(types.int64, types.int64, types.int64), codegen
    return sums


def _add_line(total: Value, source: Value, i: Value, n: int) -> Value:
    at = source + (i * (8 * LINE) + n * LINE)
    prefetch(at + 4096, 1)
    return total + load(at, "i32", 16)


def _add_byte_products(total: Value, source: Value, i: Value, n: int) -> Value:
    # Both sides change, so that no instruction set can have the products once and for all.
    return dot4(total, load(source + LINE * (n + 1), "u8", 64), load(source + ((i & 15) << 2), "i32"), 15)


def _add_product(total: Value, source: Value, i: Value, n: int) -> Value:
    return fma(load(source + LINE * (n + 1), "f32", 16), load(source + ((i & 15) << 2), "f32").splat(16), total)


_read_sums = _sums("i32", 8, _add_line)
_byte_sums, _f32_sums = _sums("i32", CHAINS, _add_byte_products), _sums("f32", CHAINS, _add_product)


@kernel
def read(args, thread, n_threads):
    """COUNT: groups of 8 lines of all threads."""
    begin, end = share(i64(args, COUNT), thread, n_threads)
    _read_sums(i64(args, SOURCE) + begin * 512, end - begin, i64(args, RESULT) + thread * SINK)


@kernel
def multiply_bytes(args, thread, n_threads):
    _byte_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * SINK)


@kernel
def multiply_f32(args, thread, n_threads):
    _f32_sums(i64(args, SOURCE), i64(args, COUNT), i64(args, RESULT) + thread * SINK)
