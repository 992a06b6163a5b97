"""What the files beside the weights say about embeddings."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from numflow.engine.tasks.embedding_recipe import EmbeddingRecipe, read_recipe
from numflow.errors import FormatError, RequestError

MODULES = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling"),
           ("2_Normalize", "sentence_transformers.models.Normalize")]


def write(folder, modules=MODULES, pooling=None, **files):
    """A folder as sentence-transformers writes it; returns what Checkpoint.files has of it."""
    write_json(folder / "modules.json", [{"idx": i, "name": str(i), "path": path, "type": kind}
                                         for i, (path, kind) in enumerate(modules)])
    write_json(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_mean_tokens": True})
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    return {"modules": folder / "modules.json", "pooling": folder / "1_Pooling" / "config.json"}


def write_json(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_models_without_files_go_by_their_specification():
    assert read_recipe({}) == EmbeddingRecipe()
    assert read_recipe({}, "cls").pooling == ("cls",)


def test_all_there_is_to_read(tmp_path):
    files = write(tmp_path, sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
                  config_sentence_transformers={"prompts": {"query": "query: ", "passage": "p: "},
                                                "default_prompt_name": "passage"})
    assert read_recipe(files, "cls") == EmbeddingRecipe(
        ("mean",), ("normalize",), 256, "sentence_bert_config.json", {"query": "query: ", "passage": "p: "}, "passage",
        lower=True, strip=True)
    assert read_recipe({"pooling": files["pooling"]}).pooling == ("mean",)


@pytest.mark.parametrize(("config", "names"), [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
    ({"pooling_mode_cls_token": True}, ("cls", "mean")),  # the mean is on unless it is switched off
    ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True},
     ("max", "last")),
    ({"pooling_mode": "lasttoken"}, ("last",)), ({"pooling_mode": ["mean", "cls"]}, ("cls", "mean")),
    ({"pooling_mode": "weightedmean"}, ("weighted_mean",))])
def test_pooling_modes(tmp_path, config, names):
    assert read_recipe(write(tmp_path, pooling=config)).pooling == names


def test_prompts_may_be_left_out_of_the_pooling(tmp_path):
    assert read_recipe(write(tmp_path)).pool_prompt
    assert not read_recipe(write(tmp_path, pooling={"include_prompt": False})).pool_prompt


def dense(tmp_path, **config):
    config = {"in_features": 3, "out_features": 2, "bias": True,
              "activation_function": "torch.nn.modules.activation.Tanh", **config}
    files = write(tmp_path, [*MODULES[:2], ("2_Dense", "sentence_transformers.models.Dense"), *MODULES[2:]])
    write_json(tmp_path / "2_Dense" / "config.json", config)
    save_file({"linear.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 10,
               "linear.bias": np.array([0.5, -0.5], np.float32)}, tmp_path / "2_Dense" / "model.safetensors")
    return files


def test_dense_layers(tmp_path):
    layer, last = read_recipe(dense(tmp_path)).layers
    np.testing.assert_allclose(layer(np.array([1.0, 2.0, 3.0])), np.tanh([0.8 + 0.5, 2.6 - 0.5]), rtol=1e-6)
    assert last == "normalize"
    layer, _ = read_recipe(dense(tmp_path, bias=False, activation_function="torch.nn.modules.linear.Identity")).layers
    np.testing.assert_allclose(layer(np.array([1.0, 2.0, 3.0])), [0.8, 2.6], rtol=1e-6)


@pytest.mark.parametrize(("config", "message"), [
    ({"activation_function": "torch.nn.GELU"}, "2_Dense/config.json: activation_function 'GELU' is unknown"),
    ({"out_features": 4}, r"2_Dense: linear.weight should be \[4, 3\] .* is \[2, 3\]")])
def test_bad_dense_layers(tmp_path, config, message):
    with pytest.raises(FormatError, match=message):
        read_recipe(dense(tmp_path, **config))


@pytest.mark.parametrize(("broken", "message"), [
    ({"modules": [("../other", "x.Pooling")]}, "'../other' is not the name of a folder"),
    ({"modules": [("..", "x.Pooling")]}, "'..' is not the name"),
    ({"modules": [("3_None", "x.Pooling")]}, "3_None/config.json: No such file"),
    ({"pooling": {"pooling_mode_mean_tokens": False}}, "no pooling mode is switched on"),
    ({"pooling": {"pooling_mode": "meen"}}, "pooling_mode 'meen' is unknown; did you mean 'mean'"),
    ({"pooling": {"pooling_mode_attention": True}}, "pooling_mode_attention is unknown"),
    ({"sentence_bert_config": {"max_seq_length": "256"}}, "max_seq_length should be a number of tokens, is '256'"),
    ({"sentence_bert_config": []}, "sentence_bert_config.json: should be a JSON object"),
    ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "default_prompt_name 'query' is none of its"),
    ({"config_sentence_transformers": {"prompts": ["a"]}}, "prompts should be an object")])
def test_broken_files(tmp_path, broken, message):
    with pytest.raises(FormatError, match=message):
        read_recipe(write(tmp_path, **broken))


def test_modules_that_are_no_modules(tmp_path):
    with pytest.raises(RequestError, match="modules.json: module 'x.LSTM' is not supported"):
        read_recipe(write(tmp_path, [*MODULES, ("4", "x.LSTM")]))
    (tmp_path / "modules.json").write_text('[{"path": ""}]')
    with pytest.raises(FormatError, match="objects with type and path"):
        read_recipe({"modules": tmp_path / "modules.json"})


def test_dimensions_of_the_configuration():
    assert read_recipe({}, "mean", {"matryoshka_dimensions": [32, 64]}).dimensions == (32, 64)
    for bad in ("64", [0], [1.5], 7):
        with pytest.raises(FormatError, match="matryoshka_dimensions.*list of numbers"):
            read_recipe({}, "mean", {"matryoshka_dimensions": bad})
