"""The dot product of 4 unsigned and 4 signed bytes per lane, exact on every instruction set."""

from numflow.cpu.simd_isa import isa
from numflow.cpu.simd_value import Value, constant, llvm_type


def dot4(acc: Value, codes: Value, x: Value, bits: int) -> Value:
    """acc i32x16 + for each lane the 4 products of the unsigned bytes of `codes` u8x64 and the signed ones of `x` i32.

    bits: how many bits the codes have. The bytes of x are -127 .. 127.
    """
    if isa() == "avx512":
        return acc.call("llvm.x86.avx512.vpdpbusd.512", acc.llvm.type, codes.as_("i32", 16), x.splat(16))
    if isa() == "plain":
        return _plain(acc, codes.as_("u16", 32), x)
    step = _avxvnni if isa() == "avxvnni" else _avx2
    low, high = (step(acc.part(8 * h, 8), codes.part(32 * h, 32), x.splat(8), bits) for h in range(2))
    return low.join(high)


def _avxvnni(acc, codes, x, bits):
    return acc.call("llvm.x86.avx512.vpdpbusd.256", acc.llvm.type, codes.as_("i32", 8), x)


def _avx2(acc, codes, x, bits):
    if bits < 8:
        return acc + _products(codes, x)
    # Two products of 8-bit codes would saturate in 16 bits: bit 7 goes apart.
    return acc + _products(codes & 127, x) + (_products(codes >> 7, x) << 7)


def dot4_signed(acc: Value, weights: Value, x: Value) -> Value:
    """The same with signed bytes on both sides, for AVX2: |w| * (x with the sign of w) does not saturate."""
    halves = []
    for half in range(2):
        w, row = weights.part(32 * half, 32), x.splat(8).as_("u8", 32)
        size = w.call("llvm.abs.v32i8", w.llvm.type, w.false())
        halves.append(acc.part(8 * half, 8) + _products(size, row.call("llvm.x86.avx2.psign.b", row.llvm.type, w)))
    return halves[0].join(halves[1])


def _products(codes, x):
    pairs = codes.call("llvm.x86.avx2.pmadd.ub.sw", llvm_type("u16", 16), x.as_("u8", 32))
    return pairs.call("llvm.x86.avx2.pmadd.wd", llvm_type("i32", 8), constant(pairs, "u16", 1, 16))


def _plain(acc, codes, x):
    """A product of a byte and a signed byte fits 16 bits; each 32-bit lane then adds its two."""
    for odd in range(2):
        x16 = x.splat(16).as_("u16", 32)
        signed = x16.sar(8) if odd else (x16 << 8).sar(8)
        products = ((codes >> 8 if odd else codes & 255) * signed).as_("i32", 16)
        acc = acc + (products << 16).sar(16) + products.sar(16)
    return acc
