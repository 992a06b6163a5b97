"""Sampling defaults of a conversation: request, model's files, list of models, built-in default, in this order."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from numflow.engine.request.defaults import read_defaults
from numflow.engine.request.sampling import CHAT, Source, model_sampling, with_model_defaults
from numflow.errors import FormatError
from tests.engine.fake import fake_model


def of_files(folder, generation=None, config=None):
    files = {"config": folder / "config.json"}
    if generation is not None:
        files["generation_config"] = folder / "generation_config.json"
        files["generation_config"].write_text(json.dumps(generation))
    return read_defaults(SimpleNamespace(path=folder, naming="hf", config=config or {}, files=files)).sampling


@pytest.mark.parametrize(("content", "values"), [
    ({"temperature": 0.6, "top_p": 0.95, "do_sample": True}, {"temperature": 0.6, "top_p": 0.95}),
    ({"temperature": 0.6, "top_k": 20.0, "min_p": 0.0, "typical_p": 0.9}, {"temperature": 0.6, "top_k": 20,
                                                                           "typical_p": 0.9, "min_p": 0.0}),
    ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
     {"temperature": 0.0, "repetition_penalty": 1.1}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}), ({"temperature": 0.5, "top_k": -1},
                                                                 {"temperature": 0.5, "top_k": 0}),
    ({"temperature": 0, "top_p": 0.5}, {"temperature": 0}),
    ({"eos_token_id": 3, "top_p": None}, {}), ({}, {})])
def test_generation_configurations(tmp_path, content, values):
    found = of_files(tmp_path, content)
    assert found.values == values and found.name == ("generation_config.json" if values else "")
    assert of_files(tmp_path, None, content).values == values
    assert of_files(tmp_path, {"temperature": 0.9, "do_sample": True}, content).values["temperature"] == 0.9


@pytest.mark.parametrize(("content", "message"), [
    ({"temperature": "hot"}, "temperature: temperature should be"), ({"top_p": 1.5}, "top_p should be above 0"),
    ({"top_k": 2.5}, "top_k should be"), ({"do_sample": "yes"}, "do_sample should be true or false, is 'yes'"),
    ({"repetition_penalty": 0}, "repetition_penalty should be")])
def test_values_that_make_no_sense(tmp_path, content, message):
    with pytest.raises(FormatError, match=f"generation_config.json: .*{message}"):
        of_files(tmp_path, content)


def test_metadata_of_gguf_files():
    keys = {"temp": 0.6000000238418579, "top_k": 20, "top_p": 0.949999988079071, "min_p": 0.0,
            "penalty_repeat": 1.0499999523162842, "penalty_last_n": 64, "xtc_probability": 0.1}
    config = {f"general.sampling.{key}": value for key, value in keys.items()}
    found = read_defaults(SimpleNamespace(naming="gguf", config=config, files={}, path=Path("x.gguf"))).sampling
    assert found == Source({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05,
                            "repeat_last_n": 64}, "general.sampling")
    with pytest.raises(FormatError, match="x.gguf: general.sampling.top_p: top_p should be"):
        read_defaults(SimpleNamespace(naming="gguf", config={"general.sampling.top_p": -1.0}, files={},
                                      path=Path("x.gguf")))


def test_the_order_of_sources():
    own, listed = Source({"temperature": 0.6}, "generation_config.json"), {"temperature": 0.2}
    assert model_sampling(own, listed, True) is own
    assert model_sampling(Source(), listed, True) == Source(listed, "the list of models")
    assert model_sampling(Source(), {}, True) == Source(CHAT, "numflow")
    assert model_sampling(Source(), {}, False).values == {}
    part = model_sampling(Source({"repetition_penalty": 1.1}, "config.json"), listed, True)
    assert part.values == {"temperature": 0.2, "repetition_penalty": 1.1}


@pytest.mark.parametrize(("given", "found"), [
    ({}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}), ({"temperature": None}, {"temperature": 0.7, "top_p": 0.8,
                                                                                    "top_k": 20}),
    ({"temperature": 0}, {"temperature": 0}), ({"top_p": 0.5}, {"temperature": 0.7, "top_p": 0.5, "top_k": 20}),
    ({"temperature": 1.2, "top_k": 0}, {"temperature": 1.2, "top_p": 0.8, "top_k": 0}),
    ({"mirostat": 2}, {"temperature": 0.7, "mirostat": 2}), ({"fsd": True}, {"temperature": 0.7, "fsd": True}),
    ({"decoding_alg": "top_p"}, {"decoding_alg": "top_p"}), ({"num_beams": 4}, {"num_beams": 4}),
    ({"samplers": ["top_k"]}, {"temperature": 1.0, "samplers": ["top_k"], "top_k": 20})])
def test_what_is_below_a_request(given, found):
    assert with_model_defaults(given, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}) == found
    assert with_model_defaults(found, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}) == found


def test_conversations_get_it_and_texts_do_not():
    model = fake_model(lambda history: [0.0] * 258)
    model._listed = lambda: {"temperature": 0.3, "top_p": 0.9}
    talk = [{"role": "user", "content": "hi"}]
    assert model.request("a", {}).sampling.temperature == 0
    model._requests._prompts.ids = lambda prompt, chat: [1]
    for prompt, settings in ((talk, {}), ("a", {"chat": True})):
        sampling = model.request(prompt, settings).sampling
        assert (sampling.temperature, sampling.top_p) == (0.3, 0.9)
        assert model.request(prompt, {**settings, "temperature": 0}).sampling.greedy
