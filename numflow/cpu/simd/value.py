"""A small language for code that is built while a kernel is compiled: values with operators that act on every lane.

A `@staged` function is run once, at that time: its arguments are `Value`s, whose operators (+ - * & | << >>) append
LLVM instructions, and its loops and ifs are unrolled and decided. In kernels it is called like any function. What it
builds gives the same bits on every instruction set.
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
    """An LLVM scalar or vector while code is built. A Python number on the right stands for all lanes."""

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

    def like(self, number: "Value | float | list") -> ir.Value:
        """`number` as a value of this type; a list gives each lane its own."""
        if isinstance(number, Value):
            return number.llvm
        if self.lanes == 1:
            return ir.Constant(self.llvm.type, number)
        numbers = number if isinstance(number, list) else [number] * self.lanes
        return ir.Constant(self.llvm.type, [ir.Constant(self.llvm.type.element, n) for n in numbers])

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

    def __lshift__(self, other):
        return self._do("shl", other)

    def __rshift__(self, other):
        """Zeros come in."""
        return self._do("lshr", other)

    def sar(self, bits: int) -> "Value":
        """Shift right, the sign comes in."""
        return self._do("ashr", bits)

    def compare(self, relation: str, other: "Value | int") -> "Value":
        """i1 lanes of "==", ">" ... of signed integers."""
        return Value(self.builder, self.builder.icmp_signed(relation, self.llvm, self.like(other)))

    def choose(self, then: "Value", otherwise: "Value | float") -> "Value":
        """Of i1 lanes: `then` where they are true."""
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
        place = ir.Constant(ir.IntType(32), index)
        return Value(self.builder, self.builder.insert_element(self.llvm, scalar.llvm, place))

    def byte_of_4(self, index: int) -> "Value":
        """Of u8 lanes, byte `index` of each 4, widened to i32."""
        zeros = Value(self.builder, ir.Constant(self.llvm.type, None))
        picks = [4 * lane + index if byte == 0 else self.lanes for lane in range(self.lanes // 4) for byte in range(4)]
        return _shuffle(self, zeros, picks).as_("i32", self.lanes // 4)

    def part(self, begin: int, lanes: int) -> "Value":
        """Lanes [begin, begin + lanes)."""
        return _shuffle(self, self, range(begin, begin + lanes))

    def halves(self) -> "list[Value]":
        """The lower half of the lanes, and the upper one."""
        return [self.part(begin, self.lanes // 2) for begin in (0, self.lanes // 2)]

    def pick(self, lanes: Sequence[int]) -> "Value":
        """The lanes of these numbers, in this order."""
        return _shuffle(self, self, lanes)

    def padded(self, lanes: int) -> "Value":
        """This vector's lanes, then any values."""
        anything = Value(self.builder, ir.Constant(self.llvm.type, ir.Undefined))
        return _shuffle(self, anything, [min(i, self.lanes) for i in range(lanes)])

    def join(self, high: "Value") -> "Value":
        """This vector's lanes, then those of `high`."""
        return _shuffle(self, high, range(2 * self.lanes))

    def by_bytes(self, do: Callable[..., "Value"], nbytes: int, *others: "Value") -> "Value":
        """Apply `do` to so many bytes at a time of this vector and of others as large, and join the results."""
        count = self.nbytes // nbytes
        parts = [[v.part(v.lanes // count * i, v.lanes // count) for v in (self, *others)] for i in range(count)]
        return joined([do(*part) for part in parts])

    def zipped(self, other: "Value") -> "Value":
        """Lanes of this vector and of another one in turns."""
        return _shuffle(self, other, [i // 2 + self.lanes * (i % 2) for i in range(2 * self.lanes)])

    def with_odd(self, other: "Value") -> "Value":
        """This vector with the odd lanes of another one."""
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
        """The upper 16 bits of u16 lanes times a number."""
        return ((self.widen() * factor) >> 16).narrow("u16")

    def to_f32(self, places: int = 0) -> "Value":
        """Signed i32 as float32. places: with NEON, divided by 2^places at once."""
        if places:
            name, count = "llvm.aarch64.neon.vcvtfxs2fp.v4f32.v4i32", Value(self.builder, ir.IntType(32)(places))
            return self.by_bytes(lambda part: part.call(name, llvm_type("f32", 4), count), 16)
        return Value(self.builder, self.builder.sitofp(self.llvm, llvm_type("f32", self.lanes)))

    def call(self, name: str, result: ir.Type, *others: "Value") -> "Value":
        """The LLVM intrinsic `name` of this value and others."""
        return Value(self.builder, call(self.builder, name, result, self.llvm, *(other.llvm for other in others)))


def _shuffle(low: Value, high: Value, lanes: Sequence[int]) -> Value:
    i32 = ir.IntType(32)
    pick = ir.Constant(ir.VectorType(i32, len(lanes)), [ir.Constant(i32, i) for i in lanes])
    return Value(low.builder, low.builder.shuffle_vector(low.llvm, high.llvm, pick))


def llvm_type(kind: str, lanes: int = 1) -> ir.Type:
    """LLVM's type for `lanes` elements of a kind."""
    return _ELEMENT[kind] if lanes == 1 else ir.VectorType(_ELEMENT[kind], lanes)


def constant(like: Value, kind: str, number: float, lanes: int = 16) -> Value:
    """`number` in every lane."""
    element = llvm_type(kind)
    value = ir.Constant(element, number)
    return Value(like.builder, value if lanes == 1 else ir.Constant(llvm_type(kind, lanes), [value] * lanes))


def load(address: Value, kind: str, lanes: int = 1) -> Value:
    """`lanes` elements from an address of any alignment."""
    return Value(address.builder, load_at(address.builder, address.llvm, llvm_type(kind, lanes)))


def save(address: Value, value: Value, align: int = 4) -> None:
    """Write a value to memory."""
    pointer = address.builder.inttoptr(address.llvm, value.llvm.type.as_pointer())
    address.builder.store(value.llvm, pointer).align = align


def prefetch(address: Value, cache: int) -> None:
    """Begin to fetch the line at an address, which need not exist, into the first or second cache."""
    i32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    pointer = address.builder.inttoptr(address.llvm, byte)
    read, locality, data = ir.Constant(i32, 0), ir.Constant(i32, 4 - cache), ir.Constant(i32, 1)
    call(address.builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, locality, data)


def load_f16(address: Value) -> Value:
    """16 float16, as float32."""
    return Value(address.builder, widen_f16_ir(address.builder, load(address, "u16", 16).llvm))


def load_bf16(address: Value) -> Value:
    """16 bfloat16, as float32."""
    return (load(address, "u16", 16).widen() << 16).as_("f32", 16)


def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of 4, 8 or 16 lanes, rounded once."""
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
    """The lanes of 1, 2, 4 ... vectors, one after the other."""
    while len(vectors) > 1:
        vectors = [low.join(high) for low, high in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def turned(vectors: list[Value]) -> list[Value]:
    """Of 16 vectors of 16 lanes, the vector of all lanes 0, that of all lanes 1 ..."""
    while len(vectors) > 1:  # first those that are half of all vectors apart, neighbours last
        half = len(vectors) // 2
        vectors = [low.zipped(high) for low, high in zip(vectors[:half], vectors[half:])]
    return [vectors[0].part(16 * lane, 16) for lane in range(16)]


def exact_fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of numbers that nothing has to be rounded of, so that it may be two instructions as well as one."""
    return fma(a, b, c) if has_fma() else a * b + c


def save_first(address: Value, value: Value, count: Value) -> None:
    """Write the first `count` of 16 float32; the memory of the others is not touched."""
    pointer = address.builder.inttoptr(address.llvm, value.llvm.type.as_pointer())
    masked_store(address.builder, value.llvm, pointer, first_lanes(address.builder, count.llvm))


def staged(result: Any, *arguments: Any) -> Callable[[Callable[..., Value | None]], Any]:
    """Decorator: emit(*Values) -> Value becomes a function of compiled code with this signature of Numba types."""
    def make(emit):
        def typing(typingctx, *args):
            def codegen(context, builder, signature, values):
                value = emit(*(Value(builder, v) for v in values))
                return context.get_dummy_value() if value is None else value.llvm
            return result(*arguments), codegen
        return named_intrinsic(typing, emit, list(inspect.signature(emit).parameters.values()))
    return make
