"""Dot products of unsigned bytes with signed ones, exact on every instruction set."""

from numflow.cpu.simd.isa import X86, isa
from numflow.cpu.simd.llvm_barriers import in_order
from numflow.cpu.simd.value import Value, constant, llvm_type

_PAIR = 2 * 127  # the largest sum of two activations


class Dot:
    """Dot products of the same codes with each of some tokens, while they grow column by column.

    AVX2 multiplies pairs of bytes to sums of 16 bits; these stay what they are until one could become too large. NEON
    multiplies signed bytes: of codes of 8 bits 128 is taken away, and what the words make of that is kept apart.

    sums: what they begin with, i32x16 for each token.
    """

    def __init__(self, sums: list[Value]):
        self._sums, self._largest = sums, 0
        self._pairs: list = []
        self._apart: list = []

    def add(self, codes: Value, words: list[Value], most: int) -> None:
        """Each lane: + the 4 products of the unsigned bytes of `codes` u8x64 and the signed ones of the token's word.

        most: the largest code there is. The bytes of words (i32) are -127 .. 127.
        """
        if isa() == "neon" and most > 127:
            self._apart = self._apart or [constant(codes, "i32", 0)] * len(words)
            self._apart = [_sdot(a, constant(codes, "u8", 128, 64), word) for a, word in zip(self._apart, words)]
            self._sums = [_sdot(a, codes - 128, word) for a, word in zip(self._sums, words)]
            return
        if isa() != "avx2" or most * _PAIR >= 1 << 15:
            self._sums = [dot4(a, codes, word, most) for a, word in zip(self._sums, words)]
            return
        if self._largest + most * _PAIR >= 1 << 15:
            self._widen()
        self._largest += most * _PAIR
        pairs = [_pairs(codes, word) for word in words]
        self._pairs = [a + b for a, b in zip(self._pairs, pairs)] if self._pairs else pairs

    def before(self, address: Value) -> Value:
        """The same address, from which nothing is read before all of this is added."""
        if self._pairs:
            address, self._pairs = in_order(address, self._pairs)
        else:
            address, self._sums = in_order(address, self._sums)
        return address

    def sums(self) -> list[Value]:
        """i32x16 for each token."""
        self._widen()
        if self._apart:
            self._sums, self._apart = [a - b for a, b in zip(self._sums, self._apart)], []
        return self._sums

    def _widen(self) -> None:
        if self._pairs:
            self._sums = [a + _widened(pairs) for a, pairs in zip(self._sums, self._pairs)]
        self._pairs, self._largest = [], 0


def dot4(acc: Value, codes: Value, x: Value, most: int) -> Value:
    """acc i32x16 + for each lane the 4 products of the unsigned bytes of `codes` u8x64 and the signed ones of `x` i32.

    most: the largest code there is. The bytes of x are -127 .. 127.
    """
    match isa():
        case "avx512":
            return acc.call("llvm.x86.avx512.vpdpbusd.512", acc.llvm.type, codes.as_("i32", 16), x.splat(16))
        case "avxvnni":
            x = x.splat(8)
            return acc.by_bytes(lambda a, c: a.call("llvm.x86.avx512.vpdpbusd.256", a.llvm.type, c, x), 32, codes)
        case "avx2" if most * _PAIR < 1 << 15:
            return acc + _widened(_pairs(codes, x))
        case "avx2":  # two products would saturate in 16 bits: bit 7 goes apart
            return acc + _widened(_pairs(codes & 127, x)) + (_widened(_pairs(codes >> 7, x)) << 7)
        case "neon" if most <= 127:
            return _sdot(acc, codes, x)
        case "neon":
            return _sdot(acc, codes - 128, x) - _sdot(constant(codes, "i32", 0), constant(codes, "u8", 128, 64), x)
    return _plain(acc, codes.as_("u16", 32), x)


def byte_sums(words: Value) -> Value:
    """The sum of the 4 signed bytes of each i32 lane; the lanes are a multiple of 16."""
    if isa() == "avx512":
        zeros, ones = (constant(words, "i32", number) for number in (0, 0x01010101))
        return words.by_bytes(lambda some: zeros.call("llvm.x86.avx512.vpdpbusd.512", zeros.llvm.type, ones, some), 64)
    pairs = words.as_("u16", 2 * words.lanes)
    pairs = (pairs << 8).sar(8) + pairs.sar(8)
    return pairs.by_bytes(lambda some: _madd(some, constant(some, "u16", 1, 32)), 64)


def dot2(acc: Value, a: Value, b: Value) -> Value:
    """acc i32x16 + for each lane the 2 products of the signed 16-bit numbers of `a` and `b` i32x16."""
    if isa() == "avx512":
        return acc.call("llvm.x86.avx512.vpdpwssd.512", acc.llvm.type, a, b)
    return acc + _madd(a.as_("u16", 32), b.as_("u16", 32))


def dot4_signed(acc: Value, weights: Value, x: Value) -> Value:
    """The same with signed bytes on both sides, for NEON and AVX2: |w| * (x with the sign of w) does not saturate."""
    if isa() == "neon":
        return _sdot(acc, weights, x)

    def pairs(w):
        size, row = w.call("llvm.abs.v32i8", w.llvm.type, w.false()), x.splat(8).as_("u8", 32)
        return _pair_sums(size, row.call("llvm.x86.avx2.psign.b", row.llvm.type, w))
    return acc + _widened(weights.by_bytes(pairs, 32))


def _sdot(acc: Value, signed: Value, x: Value) -> Value:
    """By NEON: signed bytes u8x64 times signed ones."""
    x = x.splat(4).as_("u8", 16)
    return acc.by_bytes(lambda a, c: a.call("llvm.aarch64.neon.sdot.v4i32.v16i8", a.llvm.type, c, x), 16, signed)


def _pairs(codes: Value, x: Value) -> Value:
    """u16x32: sums of 2 products each, signed."""
    return codes.by_bytes(lambda c: _pair_sums(c, x.splat(8)), 32)


def _pair_sums(codes: Value, x: Value) -> Value:
    return codes.call("llvm.x86.avx2.pmadd.ub.sw", llvm_type("u16", 16), x.as_("u8", 32))


def _widened(pairs: Value) -> Value:
    """i32x16: sums of 2 neighbours of u16x32."""
    return _madd(pairs, constant(pairs, "u16", 1, 32))


def _madd(a: Value, b: Value) -> Value:
    """i32x16: sums of 2 neighbouring products of signed 16-bit lanes."""
    if isa() not in ("neon", "plain"):
        return a.by_bytes(lambda a, b: a.call("llvm.x86.avx2.pmadd.wd", llvm_type("i32", 8), b), 32, b)
    if X86:
        return a.by_bytes(lambda a, b: a.call("llvm.x86.sse2.pmadd.wd", llvm_type("i32", 4), b), 16, b)
    a, b = a.as_("i32", 16), b.as_("i32", 16)
    return (a << 16).sar(16) * (b << 16).sar(16) + a.sar(16) * b.sar(16)


def _plain(acc: Value, codes: Value, x: Value) -> Value:
    """Even bytes and odd ones as lanes of 16 bits."""
    x = x.splat(16).as_("u16", 32)
    return acc + _madd(codes & 255, (x << 8).sar(8)) + _madd(codes >> 8, x.sar(8))
