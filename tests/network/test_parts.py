"""Language models inside multimodal ones: a spec that extends the language model's spec."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from numflow import formats, network
from numflow.cli.app import app
from numflow.engine.quantise.quantize import quantize
from numflow.errors import SpecError
from numflow.network import WeightSource
from numflow.network.gguf.as_gguf import as_gguf
from numflow.quant.recipe import Recipe
from numflow.reference.program import Program
from tests.specs.case import load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values

LLAVA = "LlavaForConditionalGeneration"


def checkpoint(config, tensors=None, **kinds):
    return memory_checkpoint(config, tensors or {}, **kinds)


def part(kind, **keys):
    return {"architectures": [LLAVA], "text_config": {"model_type": kind, **keys}}


@pytest.mark.parametrize(("config", "message"), [
    ({"architectures": [LLAVA]}, "expected an object 'text_config' or 'llm_config'"),
    ({"architectures": [LLAVA], "text_config": 3}, "expected an object 'text_config' or 'llm_config'"),
    ({"architectures": [LLAVA], "text_config": {}}, "text_config: expected a model_type"),
    (part("lama"), "text_config: no spec of a decoder for model 'lama'"),
    (part("t5"), "text_config: no spec of a decoder for model 't5'"),
    (part("llava", text_config={"model_type": "llama"}), "text_config: no spec of a decoder for model 'llava'"),
    ({"architectures": ["BarForConditionalGeneration"], "text_config": {"model_type": "mars_text_model"}},
     "no spec for model 'BarForConditionalGeneration'"),
    ({"architectures": ["FooForConditionalGeneration"], "text_config": {"model_type": "qwen2"}},
     "--spec multimodal runs its text_config as Qwen1.5 and Qwen2"),
    (part("granite", logits_scaling=8.0),
     "is detected by multimodal on granite, but the condition `when` does not hold: `head_scale == 1 "),
    ({"architectures": ["Gemma3ForConditionalGeneration"],
      "text_config": {"vocab_size": 8, "use_bidirectional_attention": True}},
     "`when` does not hold: `not both_ways` (from use_bidirectional_attention)"),
    ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
     "`when` does not hold: `not both_ways` (from use_bidirectional_attention)"),
])
def test_what_the_configuration_lacks_is_said(config, message):
    with pytest.raises(SpecError) as error:
        network.choose_spec(checkpoint(config))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_part_says_which_specification_is_extended():
    found = network.choose_spec(checkpoint(part("mixtral", num_local_experts=4)))
    assert found.name == "multimodal on mixtral"
    assert [path.stem for path in found.chain[:3]] == ["multimodal", "mixtral", "llama"]
    assert found.title == "Mixtral (language part of a multimodal model)"
    unknown = {"architectures": ["FooForConditionalGeneration"],
               "llm_config": {"architectures": ["Qwen2ForCausalLM"]}}
    assert network.choose_spec(checkpoint(unknown), "multimodal").name == "multimodal on qwen2"


def test_gguf_files_have_no_parts():
    with pytest.raises(SpecError, match="expected an object 'text_config'"):
        network.choose_spec(checkpoint({"general.architecture": "llama"}, naming="gguf"), "multimodal")


def values_of(config, *names):
    resolved, _ = network.resolve(network.choose_spec(checkpoint(config)), checkpoint(config))
    return [resolved.parameter(name) for name in names]


def test_keys_that_are_left_out_have_the_values_of_their_makers():
    assert values_of(part("llama", rms_norm_eps=1e-5, num_hidden_layers=3),
                     "hidden", "layers", "heads", "kv_heads", "ffn_width", "norm_eps") == [4096, 3, 32, 32, 11008, 1e-5]
    assert values_of(part("mistral"), "kv_heads", "window_size") == [8, 4096]
    assert values_of(part("mistral", sliding_window=None, num_key_value_heads=None),
                     "kv_heads", "window_size") == [32, 0]


def test_what_is_left_out_may_be_that_of_the_whole():
    heard = {"architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral",
             "text_config": {"model_type": "llama", "num_hidden_layers": 2}}
    assert values_of(heard, "hidden", "layers", "head_dim", "rope_theta") == [3072, 2, 128, 1e8]


def test_keys_that_a_whole_file_leaves_out_have_the_values_of_its_class():
    whole = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 32,
             "num_attention_heads": 4, "num_hidden_layers": 2, "num_local_experts": 5, "intermediate_size": 8}
    names = "experts", "experts_per_token", "rope_theta"
    assert values_of(whole, *names) == [5, 2, 1e6]
    assert values_of(whole | {"num_experts_per_tok": 3, "rope_theta": 500.0}, *names) == [5, 3, 500.0]
    assert values_of(whole | {"rope_parameters": {"rope_theta": 7.0}}, *names) == [5, 2, 7.0]


def test_keys_beside_the_part_are_not_its_own():
    config = part("llama", hidden_size=32) | {"head_dim": 3, "num_attention_heads": 4, "hidden_size": 7}
    assert values_of(config, "hidden", "heads", "head_dim") == [32, 32, 1]


def built_of(case, config=None, rename=lambda name: name):
    ck = checkpoint(config or case.configs[0], {rename(name): shape for name, shape in case.tensors.items()})
    return network.build(network.choose_spec(ck), ck)


def shapes(built):
    return {name: weight.shape for name, weight in built.weights.items()}


def test_other_names_of_the_same_tensors():
    case = load_case("internvl")
    text = case.configs[0]["text_config"]
    chat = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
            "llm_config": text | {"architectures": ["Qwen3ForCausalLM"]}}
    first = built_of(case)
    newer = built_of(case, rename=lambda name: "model.language_model." + name.removeprefix("language_model.model."))
    older = built_of(case, chat, lambda name: name.replace("vision_tower", "vision_model")
                     .replace("multi_modal_projector", "mlp1"))
    assert shapes(first) == shapes(newer) == shapes(older) and first.entries == newer.entries == older.entries


def test_a_model_of_which_the_one_that_thinks_is_a_part():
    case = load_case("qwen2_5_omni_thinker")
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": case.configs[0],
             "talker_config": {"hidden_size": 3}}
    built = built_of(replace(case, tensors=case.tensors | {"talker.model.norm.weight": (3,)}), whole,
                     lambda name: name if name.startswith("talker.") else f"thinker.{name}")
    assert shapes(built) == shapes(built_of(case))


def test_tensors_of_no_known_tower_are_an_error():
    case = load_case("llava")
    more = replace(case, tensors=case.tensors | {"language_model.model.layers.1.cross_attn.q_proj.weight": (4, 4)})
    with pytest.raises(SpecError, match="has no place for tensor 'language_model.model.layers.1.cross_attn"):
        built_of(more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The case `llava` on disk."""
    case, folder = load_case("llava"), tmp_path_factory.mktemp("llava")
    (folder / "config.json").write_text(json.dumps(case.configs[0]))
    save_file({name: np.ascontiguousarray(values(name, shape), np.float32) for name, shape in case.tensors.items()},
              folder / "model.safetensors")
    return folder


def test_inspect_says_what_is_not_used(folder):
    said = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert "multimodal on llama" in said
    assert "not used" in said and "vision_tower" in said and "multi_modal_projector" in said
    told = json.loads(CliRunner().invoke(app, ["inspect", str(folder), "--json"]).stdout)["not_used"]
    assert set(told) == {"vision_tower", "multi_modal_projector"}
    assert sum(each["tensors"] for each in told.values()) == sum(
        not name.startswith("language_model.") for name in load_case("llava").tensors)


def test_it_runs_from_a_container_and_from_gguf(folder, tmp_path):
    source = formats.open_checkpoint(folder)
    quantize(source, tmp_path / "small.safetensors", Recipe("plain", "q8_b32t2", ()))
    ids, found = load_case("llava").inputs[0]["ids"], []
    for ck in (source, formats.open_checkpoint(tmp_path / "small.safetensors"),
               as_gguf(source, network.choose_spec(source))):
        built = network.build(network.choose_spec(ck), ck)
        found.append(run(Program(built, WeightSource(built, ck), activations="f32"), ids))
    assert network.choose_spec(formats.open_checkpoint(tmp_path / "small.safetensors")).enclosed
    assert relative_error(found[1], found[0]) < 0.1
    assert relative_error(found[2], found[0]) < 1e-4
