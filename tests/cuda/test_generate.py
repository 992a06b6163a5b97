"""A toy model on the simulator: the greedy tokens of the CPU; messages on a machine without a GPU."""

import numpy as np
import pytest

import numflow
from numflow.cuda.compiler.compat import driver
from numflow.errors import DeviceError, RequestError
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def _no_gpu():
    try:
        driver()
    except DeviceError:
        return True
    return False


def test_the_same_greedy_tokens_as_the_cpu(folder):
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    results = {}
    for backend, options in (("cpu", {}), ("cuda", {"gpu": "simulator"})):
        with numflow.load(folder, backend=backend, activations="f32", **options) as model:
            results[backend] = [model.generate([1, 7, 30, 4], max_tokens=6, ignore_eos=True).ids,
                                model.logits([5, 6, 7])]
    assert results["cuda"][0] == results["cpu"][0]
    assert len(results["cuda"][0]) == 6
    np.testing.assert_allclose(results["cuda"][1], results["cpu"][1], atol=1e-4)


@pytest.mark.merge
def test_keys_and_values_in_few_bits(folder):
    """The same codes as on the CPU, hence the same tokens; with int8 activations, attention runs on tensor cores."""
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    logits = {}
    for backend, options in (("cpu", {}), ("cuda", {"gpu": "simulator"})):
        with numflow.load(folder, backend=backend, activations="f32", kv_k="q8", kv_v="q4", **options) as model:
            logits[backend] = model.logits([5, 6, 7, 30])
    np.testing.assert_allclose(logits["cuda"], logits["cpu"], atol=1e-4)
    with numflow.load(folder, backend="cuda", gpu="simulator", kv="q8") as model:
        assert np.abs(model.logits([5, 6, 7, 30]) - logits["cpu"]).max() < 0.5 * np.std(logits["cpu"])
    with pytest.raises(RequestError, match="kv_k should be one of auto, f32, f16, bf16, q8"):
        numflow.load(folder, backend="cuda", gpu="simulator", kv_k="q7")
    with pytest.raises(RequestError, match="kv_k should be one of auto, f32, f16, q8, .*, is .bf16."):
        numflow.load(folder, backend="cuda", gpu="simulator", kv_k="bf16")


@pytest.mark.skipif(not _no_gpu(), reason="this machine has a GPU")
def test_without_a_driver(folder):
    with pytest.raises(DeviceError, match="device 'cuda' needs"):
        numflow.load(folder, backend="cuda")
