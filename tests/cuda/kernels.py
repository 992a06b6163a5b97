"""All kernels of the executor, found by binding every op case with every type of cache and of activations."""

from importlib.util import find_spec

from numflow.cuda.survey import kernels_of
from tests.cuda.small import CASES


def compiler_is_there() -> bool:
    """Whether kernels can be compiled: numba-cuda, cuda-core and the libraries behind them."""
    return all(find_spec(name) for name in ("numba_cuda", "cuda")) and find_spec("nvidia") is not None


def _all():
    found = {}
    for case in CASES:
        for kv_type in ("f32", "f16"):
            if kv_type == "f32" or case.network.caches:
                found |= kernels_of(case.network, case.weights, activations="f32", kv_type=kv_type)
    return found


ALL = _all()
