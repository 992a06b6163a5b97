"""Checkpoints that other programs have quantised are refused by their method's name, wherever it is said."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numflow.errors import FormatError
from numflow.formats import open_checkpoint
from tests.quant.small import write_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("quantised"))


@pytest.fixture
def with_config(plain, tmp_path):
    """A function: the model's folder with keys added to config.json, and tensors changed."""
    def made(change=None, **keys):
        config = json.loads((plain / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
        tensors = load_file(plain / "model.safetensors")
        if change:
            change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return made


@pytest.mark.parametrize(("method", "said"), [
    ("awq", "an AWQ"), ("gptq", "a GPTQ"), ("fp8", "an FP8"), ("bitsandbytes", "a bitsandbytes"), ("mxfp4", "an MXFP4"),
    ("compressed-tensors", "a 'compressed-tensors'"), ("torchao", "a 'torchao'"), ("of tomorrow", "a 'of tomorrow'"),
])
@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_the_method_is_named_beside_plain_tensors_too(with_config, method, said, place):
    stated = {"quant_method": method, "bits": 4}
    keys = {place: stated} if place == "quantization_config" else {place: {"quantization_config": stated}}
    with pytest.raises(FormatError, match=f"{said} checkpoint .*quantization_config of config.json.*, which is not"):
        open_checkpoint(with_config(**keys))


def test_older_forms_of_saying_it(with_config):
    with pytest.raises(FormatError, match="a bitsandbytes checkpoint"):
        open_checkpoint(with_config(quantization_config={"load_in_4bit": True}))
    with pytest.raises(FormatError, match=r"checkpoint \(compression_config of config.json\)"):
        open_checkpoint(with_config(compression_config={"format": "int-quantized"}))
    (with_config() / "quantize_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"a GPTQ checkpoint \(quantize_config.json\)"):
        open_checkpoint(with_config())


@pytest.mark.parametrize(("end", "said"), [
    ("qweight", "a GPTQ or AWQ"), ("weight_scale_inv", "an FP8"), ("weight_packed", "a 'compressed-tensors'"),
    ("absmax", "a bitsandbytes")])
def test_tensors_alone_say_it(with_config, end, said):
    def change(tensors):
        tensors[f"model.layers.0.mlp.up_proj.{end}"] = np.zeros((2, 2), np.float32)

    with pytest.raises(FormatError, match=rf"{said} checkpoint \(tensor 'model.layers.0.mlp.up_proj.{end}'\)"):
        open_checkpoint(with_config(change))


@pytest.mark.parametrize("value", [5, "gptq", [1], True])
def test_what_is_no_object_is_refused(with_config, value):
    with pytest.raises(FormatError, match="quantization_config: expected an object with quant_method"):
        open_checkpoint(with_config(quantization_config=value))


@pytest.mark.parametrize("value", [None, {}])
def test_nothing_is_plain(with_config, value):
    assert "lm_head.weight" in open_checkpoint(with_config(quantization_config=value)).tensors
