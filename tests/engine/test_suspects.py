"""Results that are NaN or infinite, and the tensor of the model's files at fault."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import numflow
from numflow import network
from numflow.engine.measure.perplexity import perplexity
from numflow.engine.runner.suspects import Suspects, _may_not_be_finite
from numflow.errors import NotFiniteError
from numflow.formats import open_checkpoint
from numflow.formats.types import TYPES, to_f32
from tests.engine.classifiers import classifier
from tests.engine.test_export import write_gguf
from tests.formats.make import dictionary, stored, tensor, torch_zip
from tests.quant.small import write_model

UP = "model.layers.1.mlp.up_proj.weight"
FOUND = r"the model's {} are not finite numbers: tensor '{}' has {} in row 3, column 5; its file is damaged"


def damaged(value: float, name: str = UP):
    return lambda tensors: tensors[name].__setitem__((3, 5), value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_tensor_is_named_to_whoever_waits(tmp_path, value):
    said = FOUND.format("logits", UP, value)
    with numflow.load(write_model(tmp_path, change=damaged(value)), backend="reference") as model:
        for settings in ({}, {"temperature": 1}, {"num_beams": 2}):
            with pytest.raises(NotFiniteError, match=said):
                model.generate("hello", max_tokens=3, **settings)
        with pytest.raises(NotFiniteError, match=said):
            perplexity(model, "hello, who is there?", 8)
        with pytest.raises(NotFiniteError, match=FOUND.format("hidden states", UP, value)):
            model.embed("hello", pooling="last")
        with numflow.Engine(model) as engine, pytest.raises(NotFiniteError, match=said):
            engine.submit("hello", max_tokens=3).result(20)


@pytest.mark.parametrize("devices", [None, "0;1", "0&1"])
def test_compiled_kernels_and_several_devices(tmp_path, devices):
    folder = write_model(tmp_path, change=damaged(np.nan))
    with numflow.load(folder, devices=devices) as model, pytest.raises(
            NotFiniteError, match=FOUND.format("logits", UP, "nan")):
        model.generate("hello", max_tokens=3)


def test_gguf(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", damaged(np.nan, "blk.1.ffn_up.weight"))
    with numflow.load(path, backend="reference") as model, pytest.raises(
            NotFiniteError, match=FOUND.format("logits", "blk.1.ffn_up.weight", "nan")):
        model.generate("hello", max_tokens=3)


def test_pickle(tmp_path):
    folder = write_model(tmp_path, change=damaged(np.nan))
    tensors = {name: np.ascontiguousarray(array, np.float32)
               for name, array in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    value = dictionary({name: tensor(stored(str(i), array.size), array.shape, [s // 4 for s in array.strides])
                        for i, (name, array) in enumerate(tensors.items())})
    storages = {str(i): array.tobytes() for i, array in enumerate(tensors.values())}
    (folder / "pytorch_model.bin").write_bytes(torch_zip(value, storages))
    with numflow.load(folder, backend="reference") as model, pytest.raises(
            NotFiniteError, match=FOUND.format("logits", UP, "nan")):
        model.generate("hello", max_tokens=3)


def test_head_of_a_classifier(tmp_path):
    folder, tensors = classifier(tmp_path, 3)
    tensors["classifier.bias"][2] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with numflow.load(folder) as model, pytest.raises(
            NotFiniteError, match="scores are not finite numbers: tensor 'classifier.bias' has nan in row 0, column 2"):
        model.scores([5, 6, 7])


def test_nothing_is_looked_for_while_logits_are_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(Suspects, "_look", lambda self: pytest.fail("looks"))
    with numflow.load(write_model(tmp_path), backend="reference") as model:
        assert model.generate("hello", max_tokens=3, ignore_eos=True).ids


def test_finite_weights_are_not_blamed_and_a_search_ends(tmp_path):
    """Sums too large for float32, and a search that may take no time at all."""
    folder = write_model(tmp_path / "large", change=lambda t: t["model.norm.weight"].__imul__(1e38))
    with numflow.load(folder, backend="reference") as model, pytest.raises(
            NotFiniteError, match="^the model's logits are not finite numbers; its weights or its specification are"):
        model.generate("hello", max_tokens=3)
    checkpoint = open_checkpoint(write_model(tmp_path / "bad", change=damaged(np.nan)))
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    assert UP in Suspects(built, checkpoint).found and Suspects(built, checkpoint, patience=-1).found == ""


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K",
                                  "IQ1_M", "IQ4_XS", "MXFP4", "NVFP4", "TQ2_0", "q4_b64t1", "I4_BF16_32", "Z4_F32_32",
                                  "U4_F16_64", "E4M3_32", "NF4_64", "E5M2_16"])
def test_rows_that_are_not_decoded_are_finite(name):
    """Random blocks, of which few or many are no numbers, as decoding all of them tells."""
    kind, rng = TYPES[name], np.random.default_rng(0)
    rows = rng.integers(0, 256, (400, 256 // kind.block * kind.size)).astype(np.uint8)
    if kind.block > 1:
        rows[:200] &= 0xBB  # no float of 16 bits has all bits of its exponent
    wrong = ~np.isfinite(to_f32(rows, name)).all(axis=1)
    told = _may_not_be_finite(rows, kind)
    assert not (wrong & ~told).any()
    if name in ("Q4_0", "Q4_K", "Q8_0", "U4_F16_64"):
        assert wrong.any() and not told[:200].any()
