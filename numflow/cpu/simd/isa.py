"""The instruction set that kernels are compiled for, decided here only.

"avx512"   AVX-512 with VNNI and VBMI
"avxvnni"  AVX2 and the 256-bit VNNI of later desktop cores
"avx2"     AVX2 with FMA and half-precision conversion
"neon"     64-bit Arm with dot products of bytes (FEAT_DotProd)
"plain"    any other processor that Numba supports: LLVM splits the vectors into its registers
"""

import functools

from numflow.kernel_cache import ARM, X86, features

_NEEDS = (
    ("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512vbmi")),
    ("avxvnni", ("avx2", "fma", "f16c", "avxvnni")),
    ("avx2", ("avx2", "fma", "f16c")),
    ("neon", ("neon", "dotprod")),
)
_SSE = "+64bit,+cx8,+cmov,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt"
_AVX2 = _SSE + ",+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
# Environment variables that make a process on x86 use a smaller instruction set than the processor has.
FORCED = {name: {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": has} for name, cpu, has in (
    ("avxvnni", "alderlake", _AVX2 + ",+avxvnni"), ("avx2", "haswell", _AVX2), ("plain", "generic", ""))}


@functools.cache
def isa() -> str:
    """The instruction set of this process: of NUMBA_CPU_FEATURES if set, else of the host."""
    has = features()
    return next((name for name, needs in _NEEDS if has.issuperset(needs)), "plain")


def has_half() -> bool:
    """Whether float16 converts to and from float32 in hardware."""
    return isa() != "plain" or ARM


@functools.cache
def has_fma() -> bool:
    """Whether a fused multiply-add of float32 is an instruction; of Numba's processors, only x86 can lack it."""
    return not X86 or "fma" in features()


@functools.cache
def has_bf16() -> bool:
    """Whether the dot product of bfloat16 pairs is an instruction."""
    return isa() == "avx512" and "avx512bf16" in features()


def token_tile() -> int:
    """Most tokens of a register tile: as many as fit the registers."""
    return 8 if isa() == "avx512" else 4
