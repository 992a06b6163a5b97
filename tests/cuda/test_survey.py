"""The kernels of large models are among those of the compile test and the GPU suite."""

import pytest

from numflow.cuda.device.call import Sizes
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.lab.shapes import Shape
from tests.cuda.kernels import EVERY, all_kernels, decoder
from tests.cuda.on_ptx.__main__ import would_launch
from tests.cuda.on_ptx.cases import jobs

SHAPES = {"1b": Shape(1, 2048, 32, 8, 8192, 256, 8192), "8b": Shape(1, 4096, 32, 8, 14336, 256, 8192)}


@pytest.mark.slow  # .ci/cuda runs it
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["F16", "BF16", "q4", "q8", "q3h", "q3h+0.5%", "Q4_0", "Q4_K", "Q6_K"])
def test_kernels_of_large_decoders_are_compiled_ahead(kind, shape):
    program = Program(*decoder(shape, kind), gpu=Notebook())
    launches = [work for rows in (1, 4, 8, 16, 64, 512) for sequences in {1, rows}
                for work in program.launches(Sizes((rows, rows, rows, sequences), 1024))]
    assert launches
    assert {work.kernel.name for work in launches} - set(all_kernels(EVERY)) == set()


@pytest.mark.slow
def test_every_kernel_of_the_gate_runs_from_its_ptx():
    """Each kernel is launched by some job of `make ptx`. The nightly run, which takes a share of the jobs, would not
    notice."""
    launched = set().union(*map(would_launch, jobs()))
    assert sorted(set(all_kernels()) - launched) == []
