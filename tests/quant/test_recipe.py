"""Recipes: schemes, presets and TOML files."""

import pytest

from numflow.errors import RequestError
from numflow.quant import SCHEMES
from numflow.quant.recipe import KEEP, PRESETS, Recipe, read_recipe


def test_a_scheme_is_a_recipe():
    recipe = read_recipe("Q3H")
    assert (recipe.name, recipe.scheme("blk.0.attn_q"), recipe.scheme("token_embd")) == ("q3h", "q3h", "q3h")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_use_schemes_that_exist(name):
    recipe = read_recipe(name)
    assert {recipe.weights, *(scheme for _, scheme in recipe.rules)} <= set(SCHEMES)
    assert recipe.scheme("blk.3.attn_q", "model.layers.3.q.weight") == name.removesuffix("-mix")
    assert recipe.scheme("token_embd") == recipe.scheme("output") != recipe.weights
    assert recipe.scheme("enc.blk.1.ffn_down") == recipe.scheme("blk.0.attn_v") != recipe.weights


def test_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('weights = "q4"\n[tensors]\n"token_embd" = "Q6"\n"blk.[01].*" = "keep"\n'
                    '"*.ffn_down" = "q2_b32t1a"\n')
    recipe = read_recipe(file)
    assert recipe.name == "mine"
    assert recipe.scheme("token_embd", "embed.weight") == "q6"
    assert recipe.scheme("blk.1.ffn_down") == KEEP  # the first that fits
    assert recipe.scheme("blk.2.ffn_down") == "q2_b32t1a"
    assert recipe.scheme("blk.2.attn_q") == "q4"
    again = tmp_path / "again.toml"
    again.write_text(recipe.toml())
    assert read_recipe(again) == recipe
    assert recipe.as_dict()["tensors"]["token_embd"] == "q6"


def test_a_file_may_leave_all_else_as_it_is(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('[tensors]\n"output" = "q8"\n')
    assert read_recipe(file) == Recipe("r", KEEP, (("output", "q8"),))


def test_a_file_of_windows(tmp_path):
    file = tmp_path / "r.toml"
    file.write_bytes(b'\xef\xbb\xbfweights = "q4"\r\n[tensors]\r\n"output" = "q8"\r\n')
    assert read_recipe(file) == Recipe("r", "q4", (("output", "q8"),))


@pytest.mark.parametrize("content, message", [
    ("weights = ", "not a readable TOML file"),
    ('wieghts = "q4"', "unknown key 'wieghts'; did you mean 'weights'"),
    ('weights = "q44"', "weights: no quantisation scheme named 'q44'"),
    ("weights = 4", "weights: should be a scheme's name or 'keep', is 4"),
    ('tensors = "q4"', "tensors should be a table"),
    ('[tensors]\n"a.*" = 3', "tensors: 'a..': should be a scheme's name"),
    ('name = 3', "name should be a plain text"),
])
def test_bad_files(tmp_path, content, message):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(RequestError, match=message) as error:
        read_recipe(file)
    assert "bad.toml" in str(error.value)


def test_what_is_none():
    with pytest.raises(RequestError, match="preset or recipe file 'q4-mx'; did you mean 'q4-mix'"):
        read_recipe("q4-mx")
