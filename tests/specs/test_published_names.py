"""Checkpoints with the names and keys that their makers publish, where transformers writes others: equal results."""

import numpy as np
import pytest

from numflow import network
from numflow.engine.tasks.scores import read_score_head
from numflow.errors import SpecError
from numflow.network import WeightSource
from numflow.reference.program import Program
from tests.specs.case import VARIANT_FOLDER, load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values

NEW = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True, "model_type": "new",
       "logn_attention_scale": False, "unpad_inputs": False, "use_memory_efficient_attention": False}


def new_gte(name: str, further: dict[str, tuple[int, ...]], **keys):
    """A GTE case with the names of its makers' code, changed keys and `further` tensors."""
    case = load_case(name)
    named = [name.replace("Gte", "New") for name in case.configs[0]["architectures"]]
    config = case.configs[0] | NEW | {"architectures": named}
    theta = config.pop("rope_parameters")["rope_theta"]
    shapes = {name.replace("gte.", "new."): shape for name, shape in case.tensors.items()}
    return case, memory_checkpoint(config | {"rope_theta": theta, "rope_scaling": None} | keys, shapes | further,
                                   make=lambda name, shape: values(name.replace("new.", "gte."), shape).astype("f4"))


def built_from(checkpoint):
    return network.build(network.choose_spec(checkpoint), checkpoint)


def test_gte_by_its_makers_names():
    case, checkpoint = new_gte("gte", {})
    built = built_from(checkpoint)
    y = run(Program(built, WeightSource(built, checkpoint)), case.inputs[0]["ids"])[case.rows[0]["rows"]]
    assert relative_error(y, case.expected["logits_0"]) < 1e-4


def test_an_embedder_with_scores_of_tokens_beside_is_no_classifier():
    heads = {"classifier.weight": (1, 32), "classifier.bias": (1,)}
    _, checkpoint = new_gte("gte", heads, architectures=["NewModel", "NewForTokenClassification"])
    assert read_score_head(checkpoint, network.choose_spec(checkpoint)) is None
    _, reranker = new_gte("gte_reranker", {})
    assert len(read_score_head(reranker, network.choose_spec(reranker)).labels) == 1


def test_a_stretched_base():
    """Formula (6) of kexue.fm/archives/9706: base times factor, and all frequencies divided by factor^(2 / dims)."""
    _, checkpoint = new_gte("gte", {}, rope_scaling={"type": "ntk", "factor": 8.0})
    built = built_from(checkpoint)
    expected = 1 / (20000 * 8.0) ** (np.arange(0, 8, 2) / 8) / 8.0 ** (2 / 8)
    np.testing.assert_allclose(built.weights["rope.0"].constant, expected, rtol=1e-6)


@pytest.mark.parametrize(("keys", "message"), [
    ({"logn_attention_scale": True}, "logn_attention_scale"), ({"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ({"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}}, "mixed_b"),
    ({"position_embedding_type": "absolute"}, "position_embedding_type"),
    ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "rope_scaling.type")])
def test_what_is_no_such_network_is_refused(keys, message):
    with pytest.raises(SpecError, match=message):
        built_from(new_gte("gte", {}, **keys)[1])


def test_a_judge_of_images_has_the_language_part_of_its_family():
    case = load_case("gemma3_multimodal")
    config = case.configs[0] | {"architectures": ["ShieldGemma2ForImageClassification"], "model_type": "shieldgemma2"}
    checkpoint = memory_checkpoint(config, case.tensors)
    built = built_from(checkpoint)
    y = run(Program(built, WeightSource(built, checkpoint)), case.inputs[0]["ids"])[case.rows[0]["rows"]]
    assert relative_error(y, case.expected["logits_0"]) < 1e-4


def test_a_model_without_a_head_has_the_layers_of_its_family():
    case, found = load_case("qwen3_moe"), []
    bare = {name.removeprefix("model."): shape for name, shape in case.tensors.items() if name != "lm_head.weight"}
    for architecture, tensors, prefix in (("Qwen3MoeForCausalLM", case.tensors, ""), ("Qwen3MoeModel", bare, "model.")):
        checkpoint = memory_checkpoint(
            case.configs[0] | {"architectures": [architecture]}, tensors,
            make=lambda name, shape, prefix=prefix: values(prefix + name, shape).astype("f4"))
        built = built_from(checkpoint)
        found.append(run(Program(built, WeightSource(built, checkpoint)), case.inputs[0]["ids"], "hidden"))
    assert relative_error(found[1], found[0]) < 1e-6


@pytest.mark.parametrize(("name", "architecture", "removed"), [
    ("gemma3_multimodal", "Gemma3Model", None), ("qwen3_5_multimodal", "Qwen3_5Model", "model.")])
def test_a_multimodal_model_without_a_head_has_the_layers_of_its_family(name, architecture, removed):
    case, found = load_case(name), []
    bare = {name.removeprefix(removed or ""): shape for name, shape in case.tensors.items() if name != "lm_head.weight"}
    for architectures, tensors, prefix in ((case.configs[0]["architectures"], case.tensors, ""),
                                           ([architecture], bare, removed or "")):
        checkpoint = memory_checkpoint(
            case.configs[0] | {"architectures": architectures}, tensors,
            make=lambda name, shape, prefix=prefix: values(prefix + name, shape).astype("f4"))
        built = built_from(checkpoint)
        found.append(run(Program(built, WeightSource(built, checkpoint)), case.inputs[0]["ids"], "hidden"))
    assert relative_error(found[1], found[0]) < 1e-6


def test_keys_of_the_first_published_code():
    case = load_case("falcon_40b")
    config = case.configs[0] | {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head_kv": 2}
    for key in ("new_decoder_architecture", "num_kv_heads", "multi_query"):
        del config[key]
    checkpoint = memory_checkpoint(config, case.tensors)
    built = built_from(checkpoint)
    y = run(Program(built, WeightSource(built, checkpoint)), case.inputs[0]["ids"])[case.rows[0]["rows"]]
    assert relative_error(y, case.expected["logits_0"]) < 1e-4


def test_queries_keys_and_values_of_another_number_of_heads_are_refused():
    case = load_case("falcon_7b")
    grouped = case.configs[0] | {"new_decoder_architecture": True}
    wider = {name: (192, 64) if "query_key_value" in name else shape for name, shape in case.tensors.items()}
    with pytest.raises(SpecError, match="query_key_value.weight.*expects 96 rows"):
        built_from(memory_checkpoint(grouped, wider))


@pytest.mark.parametrize(("keys", "message"), [
    ({"kv_source_layers": [0, 1, 0, 0]}, "shared_layer: expected a layer whose keys have 24 columns; layer 0 has 32"),
    ({"kv_source_layers": [0, 1, 0, 2]}, "shared_layer: expected a layer before layer 3 that has its own keys"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}, "scaling: expected another")])
def test_keys_and_values_that_layers_cannot_share_and_learned_factors_of_lengths_are_refused(keys, message):
    case = load_case("mistral_large4")
    text = case.configs[0]["text_config"] | keys
    with pytest.raises(SpecError, match=message):
        built_from(memory_checkpoint(case.configs[0] | {"text_config": text}, case.tensors))


@pytest.mark.parametrize(("count", "value"), [(4, 200.0), (4, np.nan), (5, 0.0)])
def test_learned_factors_of_frequencies_are_finite_and_one_per_pair(count, value):
    case = load_case("mistral_large4")

    def make(name, shape):
        return np.full(shape, value, "f4") if name == "lerope.alpha" else values(name, shape).astype("f4")

    with pytest.raises(SpecError, match="lerope.alpha.*expected 4 logarithms of factors"):
        built_from(memory_checkpoint(case.configs[0], case.tensors | {"lerope.alpha": (count,)}, make=make))


@pytest.mark.parametrize(("keys", "message"), [
    ({"qk_nope_head_dim": 8, "qk_rope_head_dim": 4}, "latent.rope_dim: .* and 0 with indexer.every, found 4"),
    ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail of .* is False; expected true"),
    ({"hidden_act": "gelu"}, "hidden_act of .* is 'gelu'; expected one of silu")])
def test_values_that_pooled_keys_and_clamped_blocks_do_not_have_are_refused(keys, message):
    case = load_case("glm5_next")
    text, rotated = case.configs[0]["text_config"] | keys, keys.get("qk_rope_head_dim", 0)
    tensors = {name: (shape[0] + rotated * ("kv_a_proj" in name), *shape[1:]) for name, shape in case.tensors.items()}
    tensors = {name: (76, 24) if rotated and "kv_b_proj" in name else shape for name, shape in tensors.items()}
    with pytest.raises(SpecError, match=message):
        built_from(memory_checkpoint(case.configs[0] | {"text_config": text}, tensors))


def test_a_share_of_rotated_columns_that_latent_attention_does_not_have_is_refused():
    case = load_case("deepseek_v3_half", VARIANT_FOLDER)
    with pytest.raises(SpecError, match="partial_rotary_factor of .* is 0.25; expected one of 1"):
        built_from(memory_checkpoint(case.configs[0] | {"partial_rotary_factor": 0.25}, case.tensors))
