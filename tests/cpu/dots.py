"""Dot products of simd/dot.py. Run as a program: compare dot products of the largest values with NumPy's."""

import numba
import numpy as np
from numba import types

from numflow.cpu.runtime.kernel import Kernel
from numflow.cpu.simd.dot import Dot, dot4, dot4_signed
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.value import constant, load, save, staged

GROUPS = 8
keep = []
MOST = (3, 7, 10, 12, 15, 31, 63, 127, 128, 129, 255)


def grown(most):
    """A compiled function: y i32 [16] = the sums over 8 groups of codes u8 [8][64] times words of x i8 [8][4]."""
    @staged(types.void, types.int64, types.int64, types.int64)
    def sums(codes, x, y):
        dot = Dot([constant(codes, "i32", 5)])
        for group in range(GROUPS):
            dot.add(load(codes + 64 * group, "u8", 64), [load(x + 4 * group, "i32")], most)
        save(y, dot.sums()[0])
    return _compiled(sums)


def one_group(most):
    """The same for the first group alone: 5 + codes * x; with `most` None for signed codes, on AVX2 and NEON."""
    @staged(types.void, types.int64, types.int64, types.int64)
    def sums(codes, x, y):
        acc, vector, word = constant(codes, "i32", 5), load(codes, "u8", 64), load(x, "i32")
        save(y, dot4_signed(acc, vector, word) if most is None else dot4(acc, vector, word, most))
    return _compiled(sums)


def _compiled(sums):
    @numba.cfunc("void(int64, int64, int64)")
    def call(codes, x, y):
        sums(codes, x, y)
    keep.append(call)
    return Kernel.prototype(call.address)


def check():
    """Check codes and activations of the largest values, of one sign or alternating, and random ones."""
    rng = np.random.default_rng(0)
    for most in MOST:
        whole, first = grown(most), one_group(most)
        for x in ([127], [-127], [127, -127], [127, 127, -127, -127], rng.integers(-127, 128, 32)):
            x = np.resize(np.asarray(x, np.int8), 4 * GROUPS)
            for codes in (np.full((GROUPS, 16, 4), most), rng.integers(0, most + 1, (GROUPS, 16, 4))):
                codes = np.ascontiguousarray(codes, np.uint8)
                expected = np.einsum("grc,gc->gr", codes.astype(np.int32), x.reshape(GROUPS, 4).astype(np.int32))
                _equal(whole, codes, x, expected.sum(0) + 5)
                _equal(first, codes, x, expected[0] + 5)
    if isa() in ("avx2", "neon"):
        signed = one_group(None)
        for x in (np.full(4, 127, np.int8), np.full(4, -127, np.int8), rng.integers(-127, 128, 4).astype(np.int8)):
            for codes in (np.full((16, 4), -128, np.int8), rng.integers(-128, 128, (16, 4)).astype(np.int8)):
                _equal(signed, codes, x, codes.astype(np.int32) @ x.astype(np.int32) + 5)


def _equal(function, codes, x, expected):
    y = np.empty(16, np.int32)
    function(codes.ctypes.data, x.ctypes.data, y.ctypes.data)
    np.testing.assert_array_equal(y, expected)


if __name__ == "__main__":
    check()
    print(isa())
