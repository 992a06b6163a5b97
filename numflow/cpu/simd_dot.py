"""The dot product of 4 unsigned and 4 signed bytes per lane, exact on every instruction set."""

from numflow.cpu.simd_isa import isa
from numflow.cpu.simd_value import Value, constant, llvm_type


def dot4(acc: Value, codes: Value, x: Value, bits: int) -> Value:
    """acc i32x16 + for each lane the 4 products of the unsigned bytes of `codes` u8x64 and the signed ones of `x` i32.

    bits: how many bits the codes have; 8 costs more than 7 where there is no VNNI.
    """
    if isa() == "avx512":
        return acc.call("llvm.x86.avx512.vpdpbusd.512", acc.llvm.type, codes.as_("i32", 16), x.splat(16))
    if isa() == "plain":
        return _plain(acc, codes.as_("i32", 16), x)
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


def _products(codes, x):
    pairs = codes.call("llvm.x86.avx2.pmadd.ub.sw", llvm_type("u16", 16), x.as_("u8", 32))
    return pairs.call("llvm.x86.avx2.pmadd.wd", llvm_type("i32", 8), constant(pairs, "u16", 1))


def _plain(acc, codes, x):
    for byte in range(4):
        signed = (x << (24 - 8 * byte)).sar(24)
        acc = acc + ((codes >> (8 * byte)) & 255) * signed.splat(16)
    return acc
