"""Products with one matrix for each head, on the simulator, for every kind of matrix; a whole model of latent
attention."""

import pytest

from numflow import network
from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from numflow.network import WeightSource
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import heads_case
from tests.specs.case import gguf_checkpoint, load_case, relative_error, run

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize(("kind", "k", "tokens"), [
    ("F16", 20, 3), ("BF16", 64, 9), ("Q8_0", 64, 1), ("Q4_K", 256, 2), ("Q6_K", 256, 1), ("q3h", 64, 5),
    ("q4+1%", 128, 2)])
@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_every_kind_of_matrix(kind, k, tokens, activations):
    """Arithmetic is float32 for all activations."""
    case = heads_case(kind, 21, k, 3, tokens)
    actual = run_case(case, Program, activations=activations, gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < case.bound


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_latent_attention(kv):
    case = load_case("deepseek_v3")
    checkpoint = gguf_checkpoint(case)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    program = Program(built, WeightSource(built, checkpoint), activations="f32", kv_type=kv, gpu=Simulated(seed=1))
    reference = Reference(built, WeightSource(built, checkpoint), kv_k=kv)
    y, expected = (run(each, case.inputs[0]["ids"]) for each in (program, reference))
    assert relative_error(y, expected) < 1e-4
    assert program.block_bytes == len(built.caches) * 64 * (32 * 4 if kv == "f32" else 36)  # rows of 32 columns
