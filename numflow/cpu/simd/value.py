"""A small language for emitting kernel code at compile time: values whose operators act on every lane.

A `@staged` function runs once, when a kernel is compiled: its arguments are `Value`s, and their operators
(+ - * & | << >>) append LLVM instructions. Python loops and ifs are so unrolled and decided at compile time. Kernels
call a staged function like any other. The emitted code gives the same bits on every instruction set.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from numflow.cpu.simd.fma import fma_ir
from numflow.cpu.simd.isa import has_fma
from numflow.cpu.simd.vector import call, first_lanes, load_at, masked_store, named_intrinsic, splat, widen_f16_ir

_ELEMENT = {"u8": ir.IntType(8), "u16": ir.IntType(16), "i32": ir.IntType(32), "f32": ir.FloatType()}


class Value:
    """An LLVM scalar or vector during code generation. A Python number on the right is broadcast to all lanes."""

    def __init__(self, builder: ir.IRBuilder, llvm: ir.Value):
        self.builder, self.llvm = builder, llvm

    @property
    def lanes(self) -> int:
        """Number of lanes; 1 for scalars."""
        return getattr(self.llvm.type, "count", 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all lanes."""
        return self.lanes * (4 if self.is_float else getattr(self.llvm.type, "element", self.llvm.type).width // 8)

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        return isinstance(getattr(self.llvm.type, "element", self.llvm.type), ir.FloatType)

    def like(self, value: "Value | float | list") -> ir.Value:
        """`value` as a constant of this type; a list has a value per lane."""
        if isinstance(value, Value):
            return value.llvm
        if self.lanes == 1:
            return ir.Constant(self.llvm.type, value)
        values = value if isinstance(value, list) else [value] * self.lanes
        return ir.Constant(self.llvm.type, [ir.Constant(self.llvm.type.element, n) for n in values])

    def _do(self, name, other):
        return Value(self.builder, getattr(self.builder, name)(self.llvm, self.like(other)))

    def __add__(self, other):
        return self._do("fadd" if self.is_float else "add", other)

    def __sub__(self, other):
        return self._do("fsub" if self.is_float else "sub", other)

    def __mul__(self, other):
        return self._do("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other):
        return self._do("fdiv", other)

    def __neg__(self):
        return Value(self.builder, self.builder.fneg(self.llvm) if self.is_float else self.builder.neg(self.llvm))

    def __and__(self, other):
        return self._do("and_", other)

    def __or__(self, other):
        return self._do("or_", other)

    def __invert__(self):
        return Value(self.builder, self.builder.not_(self.llvm))

    def __lshift__(self, other):
        return self._do("shl", other)

    def __rshift__(self, other):
        """Logical shift right."""
        return self._do("lshr", other)

    def sar(self, bits: int) -> "Value":
        """Arithmetic shift right."""
        return self._do("ashr", bits)

    def compare(self, relation: str, other: "Value | int") -> "Value":
        """i1 lanes of "==", ">" ... of signed integers."""
        return Value(self.builder, self.builder.icmp_signed(relation, self.llvm, self.like(other)))

    def choose(self, then: "Value", otherwise: "Value | float") -> "Value":
        """Select by i1 lanes: `then` where true, `otherwise` where false."""
        return Value(self.builder, self.builder.select(self.llvm, then.llvm, then.like(otherwise)))

    def false(self) -> "Value":
        """The constant i1 0, which some LLVM intrinsics take."""
        return Value(self.builder, ir.Constant(ir.IntType(1), 0))

    def splat(self, lanes: int = 16) -> "Value":
        """This scalar in every lane of a vector."""
        return Value(self.builder, splat(self.builder, self.llvm, lanes))

    def lane(self, index: int) -> "Value":
        """The scalar in one lane."""
        return Value(self.builder, self.builder.extract_element(self.llvm, ir.Constant(ir.IntType(32), index)))

    def with_lane(self, index: int, scalar: "Value") -> "Value":
        """This vector with another scalar in one lane."""
        lane = ir.Constant(ir.IntType(32), index)
        return Value(self.builder, self.builder.insert_element(self.llvm, scalar.llvm, lane))

    def byte_of_4(self, index: int) -> "Value":
        """Of u8 lanes, byte `index` of each 4, widened to i32."""
        zeros = Value(self.builder, ir.Constant(self.llvm.type, None))
        picks = [4 * lane + index if byte == 0 else self.lanes for lane in range(self.lanes // 4) for byte in range(4)]
        return _shuffle(self, zeros, picks).as_("i32", self.lanes // 4)

    def part(self, begin: int, lanes: int) -> "Value":
        """Lanes [begin, begin + lanes)."""
        return _shuffle(self, self, range(begin, begin + lanes))

    def halves(self) -> "list[Value]":
        """The lower half of the lanes and the upper half."""
        return [self.part(begin, self.lanes // 2) for begin in (0, self.lanes // 2)]

    def permute(self, lanes: Sequence[int]) -> "Value":
        """The lanes with these indices, in this order."""
        return _shuffle(self, self, lanes)

    def padded(self, lanes: int) -> "Value":
        """This vector extended to `lanes` lanes with undefined values."""
        anything = Value(self.builder, ir.Constant(self.llvm.type, ir.Undefined))
        return _shuffle(self, anything, [min(i, self.lanes) for i in range(lanes)])

    def join(self, high: "Value") -> "Value":
        """This vector's lanes, then those of `high`."""
        return _shuffle(self, high, range(2 * self.lanes))

    def by_bytes(self, do: Callable[..., "Value"], nbytes: int, *others: "Value") -> "Value":
        """Apply `do` to parts of `nbytes` bytes of this vector and of others of the same size, and join the results."""
        count = self.nbytes // nbytes
        parts = [[v.part(v.lanes // count * i, v.lanes // count) for v in (self, *others)] for i in range(count)]
        return joined([do(*part) for part in parts])

    def zipped(self, other: "Value") -> "Value":
        """Interleave the lanes of this vector and of another."""
        return _shuffle(self, other, [i // 2 + self.lanes * (i % 2) for i in range(2 * self.lanes)])

    def with_odd(self, other: "Value") -> "Value":
        """Blend: even lanes of this vector, odd lanes of another."""
        return _shuffle(self, other, [i + self.lanes * (i % 2) for i in range(self.lanes)])

    def as_(self, kind: str, lanes: int) -> "Value":
        """The same bits as another type; `kind` as in Vec."""
        return Value(self.builder, self.builder.bitcast(self.llvm, llvm_type(kind, lanes)))

    def widen(self, kind: str = "i32") -> "Value":
        """Unsigned elements as i32, or as another kind."""
        return Value(self.builder, self.builder.zext(self.llvm, llvm_type(kind, self.lanes)))

    def widen_signed(self) -> "Value":
        """Signed elements as i32."""
        return Value(self.builder, self.builder.sext(self.llvm, llvm_type("i32", self.lanes)))

    def narrow(self, kind: str) -> "Value":
        """The low bits of integers."""
        return Value(self.builder, self.builder.trunc(self.llvm, llvm_type(kind, self.lanes)))

    def high_of_product(self, factor: int) -> "Value":
        """The upper 16 bits of the product of u16 lanes and a constant."""
        return ((self.widen() * factor) >> 16).narrow("u16")

    def to_f32(self, shift: int = 0) -> "Value":
        """Signed i32 as float32. shift: NEON only, divide by 2^shift in the same instruction."""
        if shift:
            name, count = "llvm.aarch64.neon.vcvtfxs2fp.v4f32.v4i32", Value(self.builder, ir.IntType(32)(shift))
            return self.by_bytes(lambda part: part.call(name, llvm_type("f32", 4), count), 16)
        return Value(self.builder, self.builder.sitofp(self.llvm, llvm_type("f32", self.lanes)))

    def call(self, name: str, result: ir.Type, *others: "Value") -> "Value":
        """The LLVM intrinsic `name` of this value and others."""
        return Value(self.builder, call(self.builder, name, result, self.llvm, *(other.llvm for other in others)))


def _shuffle(low: Value, high: Value, lanes: Sequence[int]) -> Value:
    i32 = ir.IntType(32)
    indices = ir.Constant(ir.VectorType(i32, len(lanes)), [ir.Constant(i32, i) for i in lanes])
    return Value(low.builder, low.builder.shuffle_vector(low.llvm, high.llvm, indices))


def llvm_type(kind: str, lanes: int = 1) -> ir.Type:
    """LLVM's type for `lanes` elements of a kind."""
    return _ELEMENT[kind] if lanes == 1 else ir.VectorType(_ELEMENT[kind], lanes)


def constant(like: Value, kind: str, value: float, lanes: int = 16) -> Value:
    """`value` in every lane."""
    element = llvm_type(kind)
    scalar = ir.Constant(element, value)
    return Value(like.builder, scalar if lanes == 1 else ir.Constant(llvm_type(kind, lanes), [scalar] * lanes))


def load(address: Value, kind: str, lanes: int = 1) -> Value:
    """`lanes` elements from an address of any alignment."""
    return Value(address.builder, load_at(address.builder, address.llvm, llvm_type(kind, lanes)))


def save(address: Value, value: Value, align: int = 4) -> None:
    """Store a value."""
    pointer = address.builder.inttoptr(address.llvm, value.llvm.type.as_pointer())
    address.builder.store(value.llvm, pointer).align = align


def prefetch(address: Value, cache: int) -> None:
    """Prefetch the line at an address, which need not be mapped, into the L1 (1) or L2 (2) cache."""
    i32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    pointer = address.builder.inttoptr(address.llvm, byte)
    read, locality, data = ir.Constant(i32, 0), ir.Constant(i32, 4 - cache), ir.Constant(i32, 1)
    call(address.builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, locality, data)


def load_f16(address: Value) -> Value:
    """Load 16 float16 as float32."""
    return Value(address.builder, widen_f16_ir(address.builder, load(address, "u16", 16).llvm))


def load_bf16(address: Value) -> Value:
    """Load 16 bfloat16 as float32."""
    return (load(address, "u16", 16).widen() << 16).as_("f32", 16)


def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of 4, 8 or 16 float32 lanes, rounded once."""
    return Value(a.builder, fma_ir(a.builder, a.llvm, b.llvm, c.llvm))


def fma_each(triples: list[tuple[Value, Value, Value]]) -> list[Value]:
    """a * b + c, rounded once, of each (a, b, c): 16 triples of vectors of 1, 2, 4 or 8 lanes each."""
    lanes = triples[0][0].lanes
    if has_fma():
        name = f"llvm.fma.v{lanes}f32" if lanes > 1 else "llvm.fma.f32"
        return [a.call(name, a.llvm.type, b, c) for a, b, c in triples]
    results, at_once = [], 16 // lanes
    for first in range(0, len(triples), at_once):
        sums = fma(*(joined([v.splat(1) if lanes == 1 else v for v in side])
                     for side in zip(*triples[first:first + at_once])))
        results += [sums.part(lanes * i, lanes) if lanes > 1 else sums.lane(i) for i in range(at_once)]
    return results


def joined(vectors: list[Value]) -> Value:
    """Concatenate the lanes of 1, 2, 4 ... vectors."""
    while len(vectors) > 1:
        vectors = [low.join(high) for low, high in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def transpose(vectors: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 lanes: the first result has lane 0 of every vector."""
    while len(vectors) > 1:  # zip vectors that are half of all vectors apart first, neighbours last
        half = len(vectors) // 2
        vectors = [low.zipped(high) for low, high in zip(vectors[:half], vectors[half:])]
    return [vectors[0].part(16 * lane, 16) for lane in range(16)]


def exact_fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c where both operations are exact, so that two instructions give the same bits as one."""
    return fma(a, b, c) if has_fma() else a * b + c


def save_first(address: Value, value: Value, count: Value) -> None:
    """Store the first `count` of 16 float32; the memory of the others is not written."""
    pointer = address.builder.inttoptr(address.llvm, value.llvm.type.as_pointer())
    masked_store(address.builder, value.llvm, pointer, first_lanes(address.builder, count.llvm))


def staged(result: Any, *arguments: Any) -> Callable[[Callable[..., Value | None]], Any]:
    """Decorator: make emit(*Values) -> Value callable from compiled code, with this signature of Numba types."""
    def make(emit):
        def typing(typingctx, *args):
            def codegen(context, builder, signature, values):
                value = emit(*(Value(builder, v) for v in values))
                return context.get_dummy_value() if value is None else value.llvm
            return result(*arguments), codegen
        return named_intrinsic(typing, emit, list(inspect.signature(emit).parameters.values()))
    return make
