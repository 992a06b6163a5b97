"""All kernels of the executor, found by binding every op case with every type of weights, cache and activations."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import repeat

from numflow.cuda.compiler.compile import Binary, cached
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.linear import few_gemm
from numflow.cuda.linear.wgmma_gemm import wgmma_gemm
from numflow.cuda.survey import kernels_of
from numflow.cuda.weights import quantise
from numflow.lab.shapes import Shape, random_checkpoint, random_network
from numflow.network import WeightSource
from numflow.network.adapters.steps import adaptable
from numflow.network.states import matrix_states
from numflow.quant.layout import ROW_SCHEMES
from numflow.quant.state import STATE_TYPES
from numflow.quant.stored import STORED
from tests.cuda.attention_shapes import attention_kernels
from tests.cuda.matrices import FLOAT4, FLOAT8, QUANTISED, blank_rows, experts_case, linear_case
from tests.cuda.on_ptx.device import assembly
from tests.cuda.small import CASES

CAPABILITIES = ((8, 0), (9, 0))
NEWER = ((8, 9), (12, 0))  # compute capabilities with kernels that CAPABILITIES do not have
TENSOR = (10, 0)           # the same, with products in tensor memory
GROUPED = ("F16", "BF16", "q4", "q3h", "Q6_K")  # types of experts; kernels of others differ as those of `linear` do
EVERY = ("F16", "BF16", *QUANTISED)
APART = ("q3h+0.5%", "q6+0.5%")  # types with outliers; kernels of others differ as those of `linear` do


def compiler_is_there() -> bool:
    """Whether kernels can be compiled: numba-cuda, cuda-core and the libraries behind them."""
    return all(find_spec(name) for name in ("numba_cuda", "cuda")) and find_spec("nvidia") is not None


WIDTHS = (512, 2048)  # widths of decoders with fused steps; from 2048 on, norms have blocks of 1024 threads


def decoder(shape: Shape, kind: str, rows: Callable | None = blank_rows):
    """(network, weights) of a decoder whose matrices are rows(kind, n, k).

    The default is rows of zero bytes, for tests that only look at kernels. None: the checkpoint's own random matrices.
    """
    made = random_checkpoint(shape, kind)
    matrices = {name: replace(tensor, read=partial(rows, kind, *tensor.shape))
                for name, tensor in made.tensors.items() if rows and len(tensor.shape) == 2}
    network, checkpoint = random_network(shape, kind)[0], replace(made, tensors=made.tensors | matrices)
    return network, WeightSource(network, checkpoint)


@contextmanager
def many_rows():
    """Select the kernels for matrices with many rows already from 33 rows on, as if the GPU had one multiprocessor."""
    before, few_gemm.MULTIPROCESSORS = few_gemm.MULTIPROCESSORS, 1
    try:
        yield
    finally:
        few_gemm.MULTIPROCESSORS = before


@functools.cache
def all_kernels(grouped: tuple[str, ...] = GROUPED) -> dict[str, Kernel]:
    """All kernels by name. grouped: types of weights that experts may have."""
    found = {}
    for case in CASES:
        for kv_type in ("f32", "f16") if case.network.caches else ("f32",):
            found |= kernels_of(case.network, case.weights, activations="f32", kv_type=kv_type)
        for state_type in STATE_TYPES[1:] if matrix_states(case.network) else ():
            found |= kernels_of(case.network, case.weights, activations="f32", state_type=state_type)
    found |= attention_kernels()
    for kind in (*EVERY, *APART):
        for k in (512, 2048):  # selects kernels with a warp for each row, and with a block for each row
            case = linear_case(kind, 64, k, 1, fill="blank")
            for activations in ("int8", "f32"):
                found |= kernels_of(case.network, case.weights, activations=activations)
        with many_rows():
            found |= kernels_of(case.network, case.weights)
    for kind in (*EVERY, *APART):
        for width in WIDTHS:
            network, weights = decoder(Shape(2, width, 4, 2, 2 * width, 40, 64), kind)
            for units in (True, False):
                found |= kernels_of(network, weights, units=units)
    for kind in FLOAT8:
        for case in (linear_case(kind, 64, 512, 1, fill="blank"), experts_case(kind, 64, 512, 2, 1, fill="blank")):
            found |= kernels_of(case.network, case.weights, activations="fp8")
    for kind in FLOAT4:
        for case in (linear_case(kind, 64, 512, 1, fill="blank"), experts_case(kind, 64, 512, 2, 1, fill="blank")):
            found |= kernels_of(case.network, case.weights, activations="nvfp4")
    network, checkpoint = random_network(Shape(2, 512, 4, 2, 1024, 40, 64), "F16")
    found |= kernels_of(adaptable(network, checkpoint), WeightSource(network, checkpoint))
    without_tma = [wgmma_gemm(STORED[kind].kind.name) for kind in grouped]
    found |= {kernel.name: kernel for kernel in without_tma}
    for kind in (*grouped, APART[0]):
        case = experts_case(kind, 64, 512, experts=2, chosen=1, fill="blank")  # tiles of 16, 64 and 128 routes
        found |= kernels_of(case.network, case.weights)
    found |= {kernel.name: kernel for scheme in ROW_SCHEMES.values() for kernel in quantise.kernels(scheme)}
    return dict(sorted(found.items()))


@functools.cache
def binary(name: str, capability: tuple[int, int]) -> Binary:
    """A kernel compiled for a capability."""
    return cached(all_kernels()[name], capability)


def binaries(names: list[str], capability: tuple[int, int]) -> list[Binary]:
    """Kernels compiled for a capability, by as many processes as there are CPU cores."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(count) as pool:
        return list(pool.map(_compile, names, repeat(capability), chunksize=8))  # neighbours share device functions


def _compile(name, capability):
    made, kernel = binary(name, capability), all_kernels()[name]
    if capability == CAPABILITIES[0] or kernel.target != "sm_80":
        assembly(kernel)  # stores the PTX for the interpreter; it was generated just before
    return made


if __name__ == "__main__":
    runs = [[name for name, kernel in all_kernels().items() if kernel.runs_on(one)] for one in CAPABILITIES]
    print(f"{sum(len(binaries(names, one)) for names, one in zip(runs, CAPABILITIES))} binaries of "
          f"{len(all_kernels())} kernels")
