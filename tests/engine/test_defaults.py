"""What config.json and generation_config.json say about generating."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from numflow.engine.request.defaults import Defaults, read_defaults
from numflow.errors import FormatError


def checkpoint(folder, config, generation=None):
    files = {"config": folder / "config.json"}
    if generation is not None:
        files["generation_config"] = folder / "generation_config.json"
        files["generation_config"].write_text(json.dumps(generation))
    return SimpleNamespace(path=folder, naming="hf", config=config, files=files)


def test_nothing_is_said(tmp_path):
    assert read_defaults(checkpoint(tmp_path, {})) == Defaults()
    other = SimpleNamespace(naming="gguf", config={"num_beams": 3}, files={}, path=Path("x"))
    assert read_defaults(other) == Defaults()


def test_the_generation_configuration_comes_first(tmp_path):
    config = {"num_beams": 5, "max_length": 200, "early_stopping": True, "forced_eos_token_id": 2}
    generation = {"num_beams": 4, "length_penalty": 2, "no_repeat_ngram_size": 3, "min_length": 56, "max_length": None,
                  "forced_bos_token_id": 0, "decoder_start_token_id": 2, "bad_words_ids": [[7], [8, 9]]}
    assert read_defaults(checkpoint(tmp_path, config, generation)) == Defaults(
        4, 2, True, 3, 56, 200, 2, 0, 2, ((7,), (8, 9)))
    assert read_defaults(checkpoint(tmp_path, {"forced_eos_token_id": [6, 2]})).forced_last == 6


@pytest.mark.parametrize(("content", "message"), [
    ({"num_beams": 0}, "num_beams should be a whole number from 1, is 0"),
    ({"num_beams": True}, "num_beams should be"), ({"length_penalty": "1"}, "length_penalty should be a number"),
    ({"early_stopping": "yes"}, 'early_stopping should be true, false or "never"'),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size should be"),
    ({"bad_words_ids": [3]}, "bad_words_ids should be a list of")])
def test_values_that_make_no_sense(tmp_path, content, message):
    with pytest.raises(FormatError, match=rf"generation_config.json: {message}"):
        read_defaults(checkpoint(tmp_path, {}, content))
    with pytest.raises(FormatError, match=rf"[/\\]config.json: {message}"):
        read_defaults(checkpoint(tmp_path, content))


def test_a_generation_configuration_that_is_none(tmp_path):
    with pytest.raises(FormatError, match="generation_config.json: should be a JSON object"):
        read_defaults(checkpoint(tmp_path, {}, []))
