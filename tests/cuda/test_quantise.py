"""Weights quantised on a device: the same bytes as on the CPU, with memory that does not grow with the matrix."""

from contextlib import closing

import numpy as np
import pytest

import numflow
from numflow import quant
from numflow.cuda.device.device import Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.program import Program
from numflow.cuda.weights.quantise import Quantiser
from numflow.errors import FormatError, RequestError
from numflow.quant.layout import ROW_SCHEMES
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.quant.small import write_model

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
_SOME = {"q3h"}  # .ci/cuda has all
every_scheme = pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _SOME else pytest.mark.slow)
                                                for name in ROW_SCHEMES])


def weights(rows: int, columns: int, seed: int = 5) -> np.ndarray:
    """Normally distributed weights."""
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


def found(x: np.ndarray, name: str, importance: np.ndarray | None = None, rows: int = 2, seed: int = 0) -> np.ndarray:
    """The result of a device that quantises so many rows at a time."""
    with closing(Quantiser(lambda: Simulated(seed=seed), stage=4 * x.shape[1] * rows)) as rows_of:
        return rows_of(x, ROW_SCHEMES[name], importance)


@every_scheme
@pytest.mark.merge
def test_the_bytes_of_the_processor(name):
    """Rows of zeros, of one sign, and with blocks of very different scales; with and without importances of columns."""
    x, scheme = weights(3, 64), ROW_SCHEMES[name]
    x[0], x[1], x[2, :32] = 0, np.abs(x[1]), x[2, :32] * np.float32(1e-5)
    np.testing.assert_array_equal(found(x, name), quant.encode(x, scheme))
    importance = np.random.default_rng(1).random(64, np.float32)
    np.testing.assert_array_equal(found(x[1:2], name, importance), quant.encode(x[1:2], scheme, importance))


@pytest.mark.slow
@every_scheme
def test_every_kind_of_row(name):
    """Importances of each weight, some of them zero; weights at the limits of the row format; blocks of zeros."""
    rng, scheme = np.random.default_rng(7), ROW_SCHEMES[name]
    x = weights(4, 64)
    x[0], x[1], x[2] = x[0] * np.float32(1e-27), x[1] * np.float32(1e7), np.float32(-0.3)
    x[3, :32] = 0
    importance = rng.random((4, 64), np.float32) * (rng.random((4, 64)) > 0.2)
    np.testing.assert_array_equal(found(x[:3], name, seed=2), quant.encode(x[:3], scheme))
    np.testing.assert_array_equal(found(x[1:], name, importance[1:]), quant.encode(x[1:], scheme, importance[1:]))


@pytest.mark.slow
def test_more_blocks_than_are_summed_at_once():
    x = weights(1, 65 * 32)
    np.testing.assert_array_equal(found(x, "q4"), quant.encode(x, ROW_SCHEMES["q4"]))


def test_memory_does_not_grow_with_the_matrix():
    class Counting(Simulated):
        """A device that counts allocated bytes and runs nothing."""

        held = most = 0

        def alloc(self, nbytes):
            self.held += nbytes
            self.most = max(self.most, self.held)
            return super().alloc(nbytes)

        def free(self, memory):
            self.held -= memory.nbytes

        def launch(self, work):
            work.check()

    stage, device = 1 << 16, Counting()
    for importance in (None, np.ones((2000, 128), np.float32)):
        with closing(Quantiser(lambda: device, stage=stage)) as rows_of:
            rows_of(weights(2000, 128), ROW_SCHEMES["q2"], importance)
        assert device.held == 0 < device.most < 3 * stage


def test_feedback_and_outliers_by_way_of_it():
    """The device makes the search; the CPU does the rest of the algorithm."""
    x, asked = weights(2, 64), []

    def rows_of(dense, scheme, importance, name):
        asked.append((scheme.name, name))
        return quant.encode(dense, scheme, importance, name=name)

    inputs = np.random.default_rng(2).standard_normal((400, 64))
    moment, apart = inputs.T @ inputs, quant.find("q3h+5%")
    for scheme, extra in ((quant.find("q3h"), {"moment": moment}), (apart, {}), (apart, {"moment": moment}),
                          (apart, {"importance": np.arange(64, dtype=np.float32)})):
        expected = quant.encode(x, scheme, name="w", **extra)
        np.testing.assert_array_equal(quant.encode(x, scheme, name="w", rows_of=rows_of, **extra), expected)
    assert asked == 4 * [("q3h", "w")]


def test_what_is_refused_opens_no_device():
    with closing(Quantiser(lambda: pytest.fail("a device was opened"))) as rows_of:
        bad = weights(2, 64)
        bad[1, 3] = np.nan
        with pytest.raises(FormatError, match="w cannot be quantised: row 1, column 3 is nan"):
            rows_of(bad, ROW_SCHEMES["q4"], None, "w")
        with pytest.raises(RequestError, match="w has weights up to 1e.10"):
            rows_of(np.full((1, 32), 1e10, np.float32), ROW_SCHEMES["q4"], None, "w")
        with pytest.raises(RequestError, match="importances of w should be .64. or .2, 64., are .32."):
            rows_of(weights(2, 64), ROW_SCHEMES["q4"], np.ones(32), "w")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs whose kernels run on the simulator; the indices of opened GPUs, and the loaded kernels."""
    driver, opened, loaded = FakeDriver(2), [], []

    def compiled(kernel, capability):
        loaded.append(kernel.name)
        return fake_binary(kernel, capability)

    def open_gpu(index, careful=None):
        opened.append(index)
        return Gpu(driver, index, compiled)

    monkeypatch.delenv("NUMFLOW_CUDA", raising=False)
    monkeypatch.setenv("NUMFLOW_PREPARED", "0")  # no cache of prepared weights
    monkeypatch.setattr("numflow.cuda.device.gpu.open_gpu", open_gpu)
    yield opened, loaded
    assert driver.memory == {}


@pytest.mark.slow
def test_models_are_quantised_by_their_gpu(gpus, tmp_path):
    """A few rows of a model, because the simulator is slow: the results equal those of weights quantised by the CPU."""
    opened, loaded = gpus
    recipe = tmp_path / "one.toml"
    name = "model.layers.1.self_attn.q_proj"
    recipe.write_text(f'[tensors]\n"{name}.weight" = "q8"\n')
    path = write_model(tmp_path / "model", change=lambda tensors: tensors[name + ".weight"][4:].fill(0))
    options = {"weights": recipe, "calibration": False, "activations": "f32"}
    options["devices"] = "1;0"
    with numflow.load(path, "cuda", **options) as model:
        logits = model.logits([1, 2, 3])
    assert sorted(opened) == [0, 1, 1]  # two for the program, and the first of these again for quantising
    assert {name for name in loaded if "quantise" in name} == {
        "quantise_likes_q8", "quantise_search_q8", "quantise_pack_q8"}
    with numflow.load(path, "cuda", gpu="simulator", **options) as model:
        np.testing.assert_array_equal(model.logits([1, 2, 3]), logits)


def test_who_has_a_search_of_its_own(monkeypatch):
    monkeypatch.delenv("NUMFLOW_CUDA", raising=False)
    assert isinstance(Program.quantiser(), Quantiser)
    assert Program.quantiser("simulator") is None  # the CPU is a thousand times faster
    monkeypatch.setenv("NUMFLOW_CUDA", "simulator")
    assert Program.quantiser() is None
    kept = Program.quantiser(device := Simulated())
    kept(weights(1, 32), ROW_SCHEMES["q8"], None, "w")
    device.close = lambda: pytest.fail("it is another one's")
    kept.close()
