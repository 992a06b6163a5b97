"""The kernels that a GPU can run, by its compute capability and the environment variables that switch kernels off."""

import os
from typing import NamedTuple

from numflow.cuda.lang.kernel import FLOAT4, HOPPER, has, has_float8
from numflow.cuda.lang.tensor_memory import BLACKWELL


class Features(NamedTuple):
    """Attributes of a Device (device.py)."""

    wgmma: bool
    tcgen05: bool
    tma: bool
    float8: bool
    float4: bool


def features(capability: tuple[int, int]) -> Features:
    """The features of a GPU. $NUMFLOW_CUDA_WGMMA=0, $NUMFLOW_CUDA_TCGEN05=0, $NUMFLOW_CUDA_TMA=0: without these."""
    wgmma = capability == HOPPER and _is_on("WGMMA")
    tcgen05 = has(BLACKWELL, capability) and _is_on("TCGEN05")
    return Features(wgmma, tcgen05, tma=(wgmma or tcgen05) and _is_on("TMA"),
                    float8=wgmma or tcgen05 or has_float8(capability), float4=tcgen05 or has(FLOAT4, capability))


def _is_on(name: str) -> bool:
    return os.environ.get(f"NUMFLOW_CUDA_{name}") != "0"
