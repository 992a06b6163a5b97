"""Which instruction set kernels are compiled for; the one place where that is decided.

"avx512"   AVX-512 with VNNI and VBMI
"avxvnni"  AVX2 and the 256-bit VNNI of later desktop cores
"avx2"     AVX2 with FMA and half-precision conversion
"plain"    anything else that Numba runs on: LLVM turns the vectors into what there is
"""

import functools
from typing import Any

import numba
from llvmlite import binding

_NEEDS = (
    ("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512vbmi")),
    ("avxvnni", ("avx2", "fma", "f16c", "avxvnni")),
    ("avx2", ("avx2", "fma", "f16c")),
)


@functools.cache
def isa() -> str:
    """The instruction set of this process: NUMBA_CPU_FEATURES where set, else what the host has."""
    features = _features()
    return next((name for name, needs in _NEEDS if features.issuperset(needs)), "plain")


def has_half() -> bool:
    """Whether float16 converts to and from float32 in hardware."""
    return isa() != "plain" or binding.get_default_triple().startswith(("aarch64", "arm64"))


def token_tile() -> int:
    """Most tokens that one pass over a tile of weights serves; what fits the registers, so 32 of them or 16."""
    return 8 if isa() == "avx512" else 4


def _features() -> frozenset[str]:
    config: Any = numba.config
    if config.CPU_FEATURES is not None:
        return frozenset(f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+"))
    if config.CPU_NAME == "generic":  # Numba then compiles for the baseline of the architecture
        return frozenset()
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)
