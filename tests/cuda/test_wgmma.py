"""Products on Hopper's tensor cores: on the simulator against the reference, and as the driver launches them.

From their PTX they run in on_ptx (jobs of "-hopper"); test_sass looks at the machine code."""

from dataclasses import replace

import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.lang.kernel import HOPPER
from numflow.cuda.linear.wgmma_gemm import wgmma_gemm
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import experts_case, linear_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")


class Told(FakeDriver):
    """Keeps the names of kernels, and which of them asked for more shared memory."""

    def __init__(self):
        super().__init__()
        self.names, self.asked = [], []

    def cuFuncSetAttribute(self, name, which, value):
        self.asked.append(name)
        return super().cuFuncSetAttribute(name, which, value)

    def cuLaunchKernel(self, name, *values):
        self.names.append(name)
        return super().cuLaunchKernel(name, *values)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("F16", 20, 256, 70), ("BF16", 300, 64, 66), ("q4", 270, 512, 140), ("q3h", 40, 1056, 130), ("Q6_K", 130, 256, 129),
    ("Q4_K", 20, 256, 65)])
def test_products(kind, n, k, tokens):
    """Rows and tokens beyond a tile and fewer, columns in parts, parts of a single tile."""
    case = linear_case(kind, n, k, tokens, bias=True)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1, wgmma=True))
    assert error(actual, run_case(case, Reference)[0]) < (1e-2 if kind == "BF16" else 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "q4"])
def test_products_of_experts(kind):
    case = replace(experts_case(kind, 40, 64, experts=2, chosen=1, bias=True), schedule=(((0, 150),),))
    (actual,) = run_case(case, Program, gpu=Simulated(seed=2, wgmma=True))
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


@pytest.mark.parametrize("variable, name", [("1", "wgmma_f16"), ("0", "gemm_f16_128")])
def test_a_launch(variable, name, monkeypatch):
    """The driver gives the kernel its shared memory once it has been asked for it, unless the kernel is not wanted."""
    monkeypatch.setenv("NUMFLOW_CUDA_WGMMA", variable)
    told, case = Told(), linear_case("F16", 8, 64, 65)
    (actual,) = run_case(case, Program, gpu=Gpu(told, 0, fake_binary))
    assert name in told.names and told.asked == [name] * int(variable)
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


def test_cards_that_have_it():
    assert wgmma_gemm("f16").runs_on(HOPPER)
    assert not any(wgmma_gemm("f16").runs_on(other) for other in ((8, 0), (8, 9), (10, 0), (12, 0)))
