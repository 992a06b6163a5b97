"""Register tiles: one vector of 16 rows for each of M tokens, a Numba tuple of M f32x16.

M is part of the type, so a kernel written once is compiled for 8, 4, 2 or 1 tokens. Activations of the M tokens are
neighbouring 4-byte words in memory; loading one becomes an embedded broadcast.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.value import Value, constant, fma, llvm_type, load, save, save_first
from numflow.cpu.simd.vector import f32x16


def _zeros(tokens: int) -> Any:
    @intrinsic
    def zeros(typingctx):
        def codegen(context, builder, signature, args):
            zero = ir.Constant(llvm_type("f32", 16), None)
            return context.make_tuple(builder, signature.return_type, [zero] * tokens)
        return types.UniTuple(f32x16, tokens)(), codegen
    return zeros


zeros_1, zeros_2, zeros_4, zeros_8 = _zeros(1), _zeros(2), _zeros(4), _zeros(8)


def unpack(builder: ir.IRBuilder, tile: ir.Value) -> list[Value]:
    """The vectors of a tile."""
    return [Value(builder, vector) for vector in cgutils.unpack_tuple(builder, tile)]


def repeat(count: Value, vectors: list[Value], body: Callable[[Value, list[Value]], list[Value]]) -> list[Value]:
    """A loop: vectors = body(i, vectors) for i in 0 .. count - 1."""
    builder = count.builder
    if isa() not in ("avx512", "neon"):  # their 32 registers suffice without the stack
        _align_stack(builder)
    slots = [cgutils.alloca_once_value(builder, v.llvm) for v in vectors]
    with cgutils.for_range(builder, count.llvm) as loop:
        vectors = body(Value(builder, loop.index), [Value(builder, builder.load(slot)) for slot in slots])
        for slot, vector in zip(slots, vectors):
            builder.store(vector.llvm, slot)
    return [Value(builder, builder.load(slot)) for slot in slots]


def _align_stack(builder: ir.IRBuilder) -> None:
    """Align the stack of the function under construction, so that no spilled vector crosses a cache line.

    LLVM decides to spill too late to align the stack itself: by chance, the kernel would be up to a tenth slower.
    """
    builder.function.attributes.add("nounwind")  # true, and llvmlite omits the alignment without another attribute
    builder.function.attributes.alignstack = 64


def each_word(address: Value, tokens: int) -> list[Value]:
    """The words of `tokens` tokens at an address, as i32 scalars."""
    return [load(address + 4 * t, "i32") for t in range(tokens)]


def each_i32(address: Value, tokens: int) -> list[Value]:
    """The int32 words of `tokens` tokens, each broadcast to 16 lanes."""
    return [word.splat(16) for word in each_word(address, tokens)]


def each_f32(address: Value, tokens: int) -> list[Value]:
    """The float32 words of `tokens` tokens, each broadcast to 16 lanes."""
    return [load(address + 4 * t, "f32").splat(16) for t in range(tokens)]


def add_products(total: list[Value], rows: Value, x: Value) -> list[Value]:
    """total + rows * the float32 word of each token at x."""
    return [fma(rows, xt, t) for t, xt in zip(total, each_f32(x, len(total)))]


@intrinsic
def sums_of_pairs(typingctx, tile):
    """The sums of a tile's vectors 2i and 2i + 1."""
    def codegen(context, builder, signature, args):
        vectors = unpack(builder, args[0])
        sums = [(even + odd).llvm for even, odd in zip(vectors[::2], vectors[1::2])]
        return context.make_tuple(builder, signature.return_type, sums)
    return types.UniTuple(tile.dtype, tile.count // 2)(tile), codegen


@intrinsic
def store_tile(typingctx, tile, y, stride, rows, tokens, lanes, bias, addend, addend_stride, factor):
    """Store the first `lanes` elements of vector t of the tile, for t < tokens, to row t of y, `stride` bytes apart.

    rows:   address of int32 row indices to use instead of t, or 0.
    bias:   address of 16 float32 to add, or 0.
    addend: address of rows `addend_stride` bytes apart, or 0. With an addend, addend + factor * vector is stored.
    """
    i64 = types.int64

    def codegen(context, builder, signature, args):
        vectors = unpack(builder, args[0])
        y, stride, rows, tokens, lanes, bias, addend, addend_stride, factor = (Value(builder, a) for a in args[1:])
        factor = factor.splat(16)
        added = _load_or(bias, constant(bias, "f32", 0.0), lambda: load(bias, "f32", 16))
        whole = builder.icmp_signed(">=", lanes.llvm, lanes.like(16))
        for token, vector in enumerate(vectors):
            with builder.if_then(builder.icmp_signed(">", tokens.llvm, tokens.like(token))):
                row = _load_or(rows, Value(builder, rows.like(token)), lambda: _index(rows + 4 * token))  # noqa: B023
                sums = vector + added
                _store_row(y + stride * row, _load_or(addend, sums, lambda: fma(
                    factor, sums, load(addend + addend_stride * row, "f32", 16))), whole, lanes)  # noqa: B023
        return context.get_dummy_value()

    return types.void(tile, i64, i64, i64, i64, i64, i64, i64, i64, types.float32), codegen


def _index(address: Value) -> Value:
    return Value(address.builder, address.builder.sext(load(address, "i32").llvm, address.llvm.type))


def _load_or(address: Value, otherwise: Value, read: Callable[[], Value]) -> Value:
    """The value that `read` loads, or `otherwise` if the address is 0."""
    builder = address.builder
    before = builder.block
    with builder.if_then(builder.icmp_signed("!=", address.llvm, address.like(0))):
        loaded, inside = read(), builder.block
    phi = builder.phi(otherwise.llvm.type)
    phi.add_incoming(otherwise.llvm, before)
    phi.add_incoming(loaded.llvm, inside)
    return Value(builder, phi)


def _store_row(address: Value, vector: Value, whole: ir.Value, lanes: Value) -> None:
    with address.builder.if_else(whole) as (all_lanes, some_lanes):
        with all_lanes:
            save(address, vector)
        with some_lanes:
            save_first(address, vector, lanes)
