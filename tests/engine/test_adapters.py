"""Adapters of a loaded model: merged by name or by option."""

import json

import numpy as np
import pytest

import numflow
from numflow.cli.app import app
from numflow.engine.quantise.quantize import quantize
from numflow.errors import FormatError, ModelNotFoundError, RequestError
from numflow.formats import open_checkpoint
from numflow.quant.recipe import read_recipe
from tests.formats.peft import PREFIX, pair, write_adapter

IDS = [20, 31, 45, 60, 33, 9]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters, the second with a matrix of the first as well."""
    place = tmp_path_factory.mktemp("adapters")
    return (write_adapter(place / "one", pair(Q, (32, 32)) | pair(DOWN, (32, 48))),
            write_adapter(place / "two", pair(Q, (32, 32), seed=5), use_rslora=True))


def logits(base, **options):
    with numflow.load(base, "reference", **options) as model:
        return model.logits(IDS)


def by_hand(base, folder, scales: dict):
    """A checkpoint with sums made here."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    for place, scale in scales.items():
        found = load_file(place / "adapter_model.safetensors")
        for name in [name for name in found if "lora_A" in name]:
            added = found[name.replace("lora_A", "lora_B")] @ found[name]
            tensors[name.removeprefix(PREFIX).replace("lora_A.", "")] += np.float32(scale) * added
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_merged_is_the_sum(base, adapters, tmp_path):
    one, two = adapters
    expected = logits(by_hand(base, tmp_path / "sum", {one: 2.0, two: 4.0 * 0.25}))
    assert np.abs(expected - logits(base)).max() > 0.1
    for options in ({"adapters": {"a": one, "b": (two, 0.25)}, "merge": ["a", "b"]},
                    {"adapter": [str(one), f"{two}=0.25"]},
                    {"adapters": {"b": [str(two), 0.25]}, "merge": "b", "adapter": str(one)}):
        assert np.allclose(logits(base, **options), expected, atol=1e-4)


def test_merged_before_it_is_quantised_and_placed(base, adapters, tmp_path):
    whole = by_hand(base, tmp_path / "sum", {adapters[0]: 2.0})
    for options in ({"weights": "q8"}, {"devices": "0;1"}, {"devices": "0&1", "weights": "q8"}):
        found, expected = (logits(place, **options, **more) for place, more in
                           ((base, {"adapter": [str(adapters[0])]}), (whole, {})))
        assert np.allclose(found, expected, atol=1e-4), options


@pytest.mark.parametrize("options, error, words", [
    ({"adapters": {"a": "here"}, "merge": "b"}, RequestError, "no adapter 'b'.*known: a"),
    ({"adapters": {"a": 3}, "merge": "a"}, RequestError, "folder, scale"),
    ({"adapters": {"a": ("here", "x")}, "merge": "a"}, RequestError, "scale should be a number"),
    ({"adapters": {3: "here"}, "merge": "a"}, RequestError, "names should be texts"),
    ({"adapters": ["here"]}, RequestError, "adapters should be a table"),
    ({"adapter": ["here=much"]}, RequestError, "scale should be a number, is 'much'"),
    ({"adapter": ["here=inf"]}, RequestError, "scale should be a number"),
    ({"adapter": []}, RequestError, "adapter should be"),
    ({"adapter": ["nowhere"]}, ModelNotFoundError, "nowhere: no such file"),
    ({"merge": "a"}, RequestError, "no adapter 'a'")])
def test_what_is_refused(base, options, error, words):
    with pytest.raises(error, match=words):
        numflow.load(base, "reference", **options)


def test_an_adapter_for_another_model(base, tmp_path):
    folder = write_adapter(tmp_path, pair("model.layers.7.self_attn.q_proj", (32, 32)))
    with pytest.raises(FormatError, match="made for another model") as error:
        numflow.load(base, "reference", adapter=[str(folder)])
    assert str(folder) in str(error.value) and "layers.7" in str(error.value)


def test_a_quantised_base_is_expanded_and_told(base, adapters, tmp_path, capsys):
    small, head = tmp_path / "small.safetensors", open_checkpoint(base).tensors["lm_head.weight"].shape
    quantize(open_checkpoint(base), small, read_recipe("q8"))
    adapter = str(write_adapter(tmp_path / "adapter", pair("lm_head", head)))
    capsys.readouterr()
    found = logits(small, adapter=[adapter])
    assert "float32 now, as an adapter changes them: 1 (" in capsys.readouterr().err
    assert np.allclose(found, logits(base, adapter=[adapter]), atol=0.2)
    logits(small, adapter=[adapter], weights="q8")
    assert "float32 now" not in capsys.readouterr().err


def test_the_command(base, adapters, capsys):
    texts = []
    for more in ([], ["--adapter", str(adapters[0]), "--adapter", f"{adapters[1]}=0.5"]):
        with pytest.raises(SystemExit):
            app(["generate", "-m", str(base), "--raw", "Hello", "-n", "12", "--device", "reference", "--json",
                 "--temperature", "0", *more], prog_name="numflow")
        texts.append(json.loads(capsys.readouterr().out)["ids"])
    both = {"a": adapters[0], "b": (adapters[1], 0.5)}
    with numflow.load(base, "reference", adapters=both, merge=["a", "b"]) as model:
        assert model.generate("Hello", max_tokens=12).ids == texts[1] != texts[0]
