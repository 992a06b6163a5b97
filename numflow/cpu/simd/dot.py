"""Dot products of unsigned bytes with signed ones, exact on every instruction set."""

from numflow.cpu.simd.isa import X86, isa
from numflow.cpu.simd.llvm_barriers import in_order
from numflow.cpu.simd.value import Value, constant, llvm_type

_PAIR = 2 * 127  # the largest sum of two activations


class Dot:
    """Accumulators of the dot products of the same codes with each of some tokens.

    AVX2 multiplies bytes and adds pairs of products to 16 bits. 16-bit sums are accumulated as long as they cannot
    overflow, then widened. NEON multiplies signed bytes: 128 is subtracted from 8-bit codes, and 128 times the sum of
    the activations is accumulated separately.

    sums: initial values, i32x16 for each token.
    """

    def __init__(self, sums: list[Value]):
        self._sums, self._largest = sums, 0
        self._pairs: list = []
        self._offsets: list = []

    def add(self, codes: Value, words: list[Value], largest: int) -> None:
        """Add to each lane the 4 products of unsigned bytes of `codes` u8x64 and signed bytes of a token's word.

        largest: the largest possible code. The bytes of words (i32) are -127 .. 127.
        """
        if isa() == "neon" and largest > 127:
            self._offsets = self._offsets or [constant(codes, "i32", 0)] * len(words)
            self._offsets = [_sdot(a, constant(codes, "u8", 128, 64), word) for a, word in zip(self._offsets, words)]
            self._sums = [_sdot(a, codes - 128, word) for a, word in zip(self._sums, words)]
            return
        if isa() != "avx2" or largest * _PAIR >= 1 << 15:
            self._sums = [dot4(a, codes, word, largest) for a, word in zip(self._sums, words)]
            return
        if self._largest + largest * _PAIR >= 1 << 15:
            self._widen()
        self._largest += largest * _PAIR
        pairs = [_pairs(codes, word) for word in words]
        self._pairs = [a + b for a, b in zip(self._pairs, pairs)] if self._pairs else pairs

    def before(self, address: Value) -> Value:
        """The same address; nothing is loaded from it before all products so far are added."""
        if self._pairs:
            address, self._pairs = in_order(address, self._pairs)
        else:
            address, self._sums = in_order(address, self._sums)
        return address

    def sums(self) -> list[Value]:
        """The accumulators: i32x16 for each token."""
        self._widen()
        if self._offsets:
            self._sums, self._offsets = [a - b for a, b in zip(self._sums, self._offsets)], []
        return self._sums

    def _widen(self) -> None:
        if self._pairs:
            self._sums = [a + _widened(pairs) for a, pairs in zip(self._sums, self._pairs)]
        self._pairs, self._largest = [], 0


def dot4(acc: Value, codes: Value, x: Value, largest: int) -> Value:
    """acc i32x16 + for each lane the 4 products of the unsigned bytes of `codes` u8x64 and the signed bytes of `x` i32.

    largest: the largest possible code. The bytes of x are -127 .. 127.
    """
    match isa():
        case "avx512":
            return acc.call("llvm.x86.avx512.vpdpbusd.512", acc.llvm.type, codes.as_("i32", 16), x.splat(16))
        case "avxvnni":
            x = x.splat(8)
            return acc.by_bytes(lambda a, c: a.call("llvm.x86.avx512.vpdpbusd.256", a.llvm.type, c, x), 32, codes)
        case "avx2" if largest * _PAIR < 1 << 15:
            return acc + _widened(_pairs(codes, x))
        case "avx2":  # two products would saturate in 16 bits: multiply bit 7 separately
            return acc + _widened(_pairs(codes & 127, x)) + (_widened(_pairs(codes >> 7, x)) << 7)
        case "neon" if largest <= 127:
            return _sdot(acc, codes, x)
        case "neon":
            return _sdot(acc, codes - 128, x) - _sdot(constant(codes, "i32", 0), constant(codes, "u8", 128, 64), x)
    return _plain(acc, codes.as_("u16", 32), x)


def byte_sums(words: Value) -> Value:
    """The sum of the 4 signed bytes of each i32 lane; the lanes are a multiple of 16."""
    if isa() == "avx512":
        zeros, ones = (constant(words, "i32", value) for value in (0, 0x01010101))
        return words.by_bytes(lambda part: zeros.call("llvm.x86.avx512.vpdpbusd.512", zeros.llvm.type, ones, part), 64)
    pairs = words.as_("u16", 2 * words.lanes)
    pairs = (pairs << 8).sar(8) + pairs.sar(8)
    return pairs.by_bytes(lambda part: _madd(part, constant(part, "u16", 1, 32)), 64)


def dot2(acc: Value, a: Value, b: Value) -> Value:
    """acc i32x16 + for each lane the 2 products of the signed 16-bit halves of `a` and `b` i32x16."""
    if isa() == "avx512":
        return acc.call("llvm.x86.avx512.vpdpwssd.512", acc.llvm.type, a, b)
    return acc + _madd(a.as_("u16", 32), b.as_("u16", 32))


def dot4_signed(acc: Value, weights: Value, x: Value) -> Value:
    """dot4 with signed bytes on both sides, for NEON and AVX2: |w| * (x with the sign of w) does not saturate."""
    if isa() == "neon":
        return _sdot(acc, weights, x)

    def pairs(w):
        absolute, row = w.call("llvm.abs.v32i8", w.llvm.type, w.false()), x.splat(8).as_("u8", 32)
        return _pair_sums(absolute, row.call("llvm.x86.avx2.psign.b", row.llvm.type, w))
    return acc + _widened(weights.by_bytes(pairs, 32))


def _sdot(acc: Value, signed: Value, x: Value) -> Value:
    """NEON: dot4 of signed bytes u8x64 and signed bytes of x."""
    x = x.splat(4).as_("u8", 16)
    return acc.by_bytes(lambda a, c: a.call("llvm.aarch64.neon.sdot.v4i32.v16i8", a.llvm.type, c, x), 16, signed)


def _pairs(codes: Value, x: Value) -> Value:
    """u16x32: sums of 2 products each, signed."""
    return codes.by_bytes(lambda c: _pair_sums(c, x.splat(8)), 32)


def _pair_sums(codes: Value, x: Value) -> Value:
    return codes.call("llvm.x86.avx2.pmadd.ub.sw", llvm_type("u16", 16), x.as_("u8", 32))


def _widened(pairs: Value) -> Value:
    """i32x16: sums of 2 neighbouring lanes of u16x32."""
    return _madd(pairs, constant(pairs, "u16", 1, 32))


def _madd(a: Value, b: Value) -> Value:
    """i32x16: sums of the products of 2 neighbouring signed 16-bit lanes."""
    if isa() not in ("neon", "plain"):
        return a.by_bytes(lambda a, b: a.call("llvm.x86.avx2.pmadd.wd", llvm_type("i32", 8), b), 32, b)
    if X86:
        return a.by_bytes(lambda a, b: a.call("llvm.x86.sse2.pmadd.wd", llvm_type("i32", 4), b), 16, b)
    a, b = a.as_("i32", 16), b.as_("i32", 16)
    return (a << 16).sar(16) * (b << 16).sar(16) + a.sar(16) * b.sar(16)


def _plain(acc: Value, codes: Value, x: Value) -> Value:
    """dot4 without special instructions: even and odd bytes as 16-bit lanes."""
    x = x.splat(16).as_("u16", 32)
    return acc + _madd(codes & 255, (x << 8).sar(8)) + _madd(codes >> 8, x.sar(8))
