"""Models whose values, names or shapes mlx-lm changes, read as the models they were made from."""

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats import open_checkpoint
from tests.formats import mlx_files
from tests.formats.families import floats, logits_of, wider
from tests.specs.case import load_case, relative_error
from tests.specs.weights import values

FAMILIES = ("afmoe", "deepseek_v3", "falcon_h1", "gemma4_moe", "gpt_oss", "granitemoehybrid", "granitemoehybrid_dense",
            "llama4", "qwen3_5", "qwen3_5_moe", "qwen3_next")


def same(tmp_path, stored, tensors, config, ids):
    """Check that the stored tensors give the published tensors' results."""
    found = logits_of(tmp_path / "mlx", floats(stored), config, ids)
    expected = logits_of(tmp_path / "plain", floats(tensors), config, ids)
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("name", [*FAMILIES, "kimi_linear", "qwen3_next_experts", "falcon_h1_normed"])
def test_models_that_mlx_lm_has_changed(tmp_path, name):
    """Against transformers' results."""
    case = load_case(name)
    tensors = {tensor: values(tensor, shape).astype(np.float32) for tensor, shape in case.tensors.items()}
    stored = mlx_files.converted(case.configs[0], tensors)
    found = logits_of(tmp_path / "mlx", floats(stored), case.configs[0], case.inputs[0]["ids"])
    assert relative_error(found[case.rows[0]["rows"]], case.expected["logits_0"]) < 1e-4


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.thin(3)
def test_models_that_mlx_lm_has_changed_and_quantised(tmp_path, name, bits, group):
    """Against the published form of the decoded values."""
    config, tensors, ids = wider(name)
    files, meant = mlx_files.quantised(mlx_files.converted(config, tensors), bits, group)
    plain = floats(mlx_files.published(config, meant))
    assert {key: x.shape for key, (_, x) in plain.items()} == {key: x.shape for key, x in tensors.items()}
    expected = logits_of(tmp_path / "plain", plain, config, ids)
    said = {"group_size": group, "bits": bits}
    if name.startswith("qwen3_5"):  # as published, beside a model that sees
        files = {f"language_model.{key}": x for key, x in files.items()} | {
            "vision_tower.patch_embed.proj.weight": ("BF16", np.zeros((8, 1), np.uint16))}
        kind = config["model_type"].removesuffix("_text")
        config = {"architectures": [config["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
                  "model_type": kind, "text_config": config}
    found = logits_of(tmp_path / "mlx", files, config | {"quantization": said, "quantization_config": said}, ids)
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize(("raw", "head"), [(False, 1), (True, 1), (False, 0.55), (True, 1.6)])
def test_factors_that_a_converter_has_left_alone(tmp_path, raw, head):
    """If convolutions are transposed as in mlx-lm's files, the magnitudes of embeddings and head show where factors
    were applied."""
    config, tensors, ids = wider("falcon_h1")
    tensors["lm_head.weight"] *= np.float32(head)
    stored = mlx_files.converted(config, tensors)
    if raw:
        stored = {name: stored[name] if "conv1d" in name else x for name, x in tensors.items()}
    same(tmp_path, stored, tensors, config, ids)


def test_factors_of_which_nothing_tells_where_they_are(tmp_path):
    config, tensors, ids = wider("falcon_h1")
    stored = floats(mlx_files.converted(config, tensors))
    between = stored | {"lm_head.weight": ("F32", stored["lm_head.weight"][1] * np.float32(2.6))}
    with pytest.raises(FormatError, match=r"model.safetensors: tensor .lm_head.weight.: is .* smaller .*: near 7.14"):
        logits_of(tmp_path / "between", between, config, ids)
    biased = stored | {"model.layers.0.self_attn.o_proj.bias": ("F32", np.ones(64, np.float32))}
    with pytest.raises(FormatError, match="o_proj.bias.*is a bias of a model with factors"):
        logits_of(tmp_path / "biased", biased, config, ids)


def test_one_table_for_embeddings_and_head_has_the_embeddings_factor(tmp_path):
    config, tensors, ids = wider("falcon_h1")
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]
    stored = mlx_files.converted(config, tensors)
    same(tmp_path, stored, tensors, config, ids)


def test_further_tokens_are_not_predicted_from_mlx_files(tmp_path):
    """Converters that keep the prediction block store its norms with or without the added 1."""
    config, tensors, ids = wider("qwen3_next")
    stored = floats(mlx_files.converted(config, tensors))
    stored["mtp.norm.weight"] = "F32", np.ones(64, np.float32)
    logits_of(tmp_path / "mlx", stored, config, ids)
    assert "mtp.norm.weight" not in open_checkpoint(tmp_path / "mlx").tensors
