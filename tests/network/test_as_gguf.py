"""Checkpoints of every family written as GGUF files, against the output of llama.cpp's converter (gguf/*.npz)."""

import numpy as np
import pytest

from numflow import network
from numflow.errors import RequestError
from numflow.network import WeightSource
from numflow.network.gguf.as_gguf import as_gguf
from numflow.reference.program import Program
from numflow.spec import list_specs, load_spec
from tests.specs import toy
from tests.specs.case import gguf_checkpoint, gguf_names, load_case, memory_checkpoint, names, relative_error, run
from tests.specs.configs_further_decoders import FURTHER_DECODERS
from tests.specs.configs_further_encoders import FURTHER_ENCODERS
from tests.specs.configs_further_translators import FURTHER_TRANSLATORS
from tests.specs.configs_gated_sums import GATED
from tests.specs.configs_last_parts import LAST_PARTS
from tests.specs.configs_last_text import LAST_TEXT
from tests.specs.configs_late_loops import LOOPS
from tests.specs.configs_late_moe import LATE_MOE
from tests.specs.configs_more_decoders import DECODERS as MORE_DECODERS
from tests.specs.configs_more_encoders import ENCODERS as MORE_ENCODERS
from tests.specs.configs_more_moe import MORE_MOE
from tests.specs.configs_more_parts import MORE_PARTS
from tests.specs.configs_more_translators import TRANSLATORS as MORE_TRANSLATORS
from tests.specs.toy import namings

# What only the source can say, or only numflow would heed.
REFUSED = {
    "afmoe": "step is cache_write, and would be read as rope", "apertus": "gguf metadata has no 'apertus.xielu",
    "bitnet": "ffn_act: kind is relu2, and would be read as silu",
    "bert": "head_dense: step is linear, and would be read as none",
    "jina_embeddings_v3": "head_dense", "modernbert": "head_dense: step is linear",
    "deepseek_v2": "groups is 4", "ernie4_5_moe": "step is linear, and would be read as moe_route",
    "gemma3n": "step is rope_angles", "gemma4": "should read the keys and values of a layer before",
    "gemma4_moe": "window is 5", "llama4": "chunk is 6", "phimoe": "jitter is 0.2",
    "exaone4": "step is cache_write, and would be read as rope", "exaone4_5": "step is cache_write",
    "nomic_bert_masked": "head_dense: step is linear", "qwen2_5_vl": "window is 4", "falcon_rw": "attn_qkv",
    "flan_t5": "bucket_distance is 20", "gemma2_scaled": "scale is 0.30", "gemma3": "rope_angles",
    "gemma_embedding": "rope_angles",
    "gpt2_scaled": "scale is 0.125", "gpt_oss_clamped": "limit is 0.8", "mistral": "window is 5",
    "falcon_h1": "missing tensor ffn_norm", "falcon_h1_normed": "missing tensor ffn_norm",
    "mamba2_limited": "softplus: least is 0.3", "minimax": "attn_skip: scale is 1.5",
    "nemotron_h": "softplus: least is 0.001", "nemotron_h_moe": "softplus: least is 0.001",
    "olmo3": "angles: scale is 1.2079, and would be read as 1.20794",
    "phi3_window": "window is 6", "qwen2_moe_sparse": "moe_route", "qwen2_window": "window is 4",
    "qwen3_moe_mixed": "moe_route", "qwen3_vl_moe_mixed": "moe_route", "qwen3_next": "moe_route",
    "starcoder2_window": "window is 5"}
REFUSED |= {
    "granite_swa": "blk.2.angles: step is rope_angles", "granitemoe_swa": "blk.2.angles: step is rope_angles",
    "mellum": "step is linear, and would be read as moe_route", "mellum_defaults": "normalize is False",
    "minicpm3_plain_query": "step is linear, and would be read as rms_norm",
    "cohere2_moe_sum": "step is add, and would be read as scale", "dbrx_plain": "normalize is False",
    "nemotron_h_omni": "softplus: least is 0.001", "eurobert": "output: step is linear"}
REFUSED |= {
    "laguna": "router_softcap", "mimo_v2_flash": "blk.0.angles: columns", "minimax_m3": "limit is 1.5",
    "minimax_m3_full": "alpha is 1.5", "hrm_text_once": "kind is gelu",
    "mistral4_groups": "step is linear, and would be read as rms_norm"}
REFUSED |= dict.fromkeys(("aya_vision", "cohere2_vision", "granite_speech"), "is linear, and would be read as scale")
REFUSED |= {"paligemma2": "attention: scale is 0.22"}
NEW = ("mimo_v2_flash", "hrm_text", "step3p7")
NO_ARCHITECTURE = ("albert", "bamba", "bart", "blenderbot", "cwm", "deepseek_v32", "distilbert", "electra",
                   "electra_generator", "gemma3_multimodal", "glm", "glm4_moe_lite", "glm_moe_dsa", "gpt_neo", "gptj",
                   "llama4_multimodal", "m2m100", "marian", "mbart", "mistral3", "mpnet", "mt5", "multilingual_e5",
                   "nanochat", "nllb", "olmo_hybrid", "opt", "opt_350m", "pegasus", "recurrent_gemma", "roberta",
                   "solar_open", "vaultgemma", "xlm_roberta", "biogpt", "blenderbot_small", "glm46v", "glm4v",
                   "glm_ocr", "megatron_bert", "mvp", "plbart", "qwen2_5_omni_thinker", "rembert",
                   "roberta_prelayernorm", "t5gemma", "umt5", "xlm_roberta_xl")
NO_ARCHITECTURE += ("codegen", "codegen_tied", "ernie", "ernie_hidden", "falcon_mamba", "falcon_mamba_biased",
                    "gemma4_unified",
                    "gemma4_unified_multimodal", "hyperclovax", "hyperclovax_plain", "iquestcoder", "kolibri1",
                    "kolibri1_defaults", "lfm3", "lfm3_plain", "ministral",
                    "ministral_window", "mistral4_multimodal", "persimmon",
                    "persimmon_plain", "xglm", "xglm_relu", "youtu", "youtu_plain_query")
NO_ARCHITECTURE += tuple(name for name in LATE_MOE
                         if not name.startswith(("qwen3_vl", "hy_v3", "minimax_m3_blocks", *NEW)))
MORE = MORE_DECODERS | MORE_ENCODERS | MORE_PARTS | MORE_TRANSLATORS
NO_ARCHITECTURE += tuple(name for name in MORE if name not in REFUSED
                         and not name.startswith(("dbrx", "granite_docling", "nemotron_h", "step3p7")))
NO_ARCHITECTURE += tuple(name for name in names() if name.startswith("deberta"))
FURTHER = FURTHER_DECODERS | FURTHER_ENCODERS | FURTHER_TRANSLATORS | MORE_MOE | LOOPS
NO_ARCHITECTURE += tuple(name for name in FURTHER if name != "mt5_encoder" and not name.startswith(NEW))
NO_ARCHITECTURE += tuple(name for name in names() if name.startswith("qwen4_exp"))
NO_ARCHITECTURE += ("cosmos3_omni", "emu3", "fuyu", "hyperclovax_vision")
NO_ARCHITECTURE += tuple(name for name in LAST_PARTS | LAST_TEXT | GATED
                         if name not in (*REFUSED, "instructblip", "paligemma"))
WRITTEN = [name for name in names() if name not in (*REFUSED, *NO_ARCHITECTURE)]
# Files of these are read; which of their layers see everything, numbers of activations, gates that are not divided by
# their sum, a least step and factors are not written. MiMo always has a window; a shared expert of MiniMax-M3 is a
# multiple of others.
PATTERNS = ("afmoe", "apertus", "bitnet", "falcon_h1", "gemma3n", "gemma4", "kimi_linear", "nemotron_h",
            "mimo_v2_flash", "minimax_m3")
# Rows of layers that rotate nothing are in whatever order.
OTHER_ROWS = {"granitemoehybrid": {"blk.1.attn_k.weight", "blk.1.attn_q.weight"},
              "smollm3": {"blk.3.attn_k.weight", "blk.3.attn_q.weight"}}
# Keys that one of the two leaves out, because readers find the same without them.
OPTIONAL = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.dimension_count",
            "rope.freq_base", "rope.scaling.type", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
            "expert_feed_forward_length", "vocab_size", "expert_weights_norm", "expert_group_count",
            "expert_group_used_count", "expert_gating_func", "attention.recurrent_layers", "ssm.dt_b_c_rms")
OTHERWISE = {"bloom": {"context_length"}, "granitemoehybrid": {"context_length"},
             "phi3_long": {"attention.sliding_window"},
             "phi4_mini": {"attention.sliding_window"}, "stablelm": {"use_parallel_residual"},
             "stablelm_whole": {"use_parallel_residual"}, "falcon_7b": {"tensor_data_layout"},
             "falcon_40b": {"tensor_data_layout"}, "minilm": {"pooling_type"}, "t5": {"attention.layer_norm_epsilon"},
             **{f"t5_encoder{end}": {"attention.layer_norm_epsilon"} for end in ("", "_gated")},
             "gemma_embedding_one_in_six": {"pooling_type"},
             "modernbert_embedding": {"pooling_type", "classifier.pooling_type", "attention.layer_norm_epsilon",
                                      "attention.layer_norm_rms_epsilon"},
             "nemotron": {"attention.layer_norm_rms_epsilon"},
             **{f"hrm_text{end}": {"hrm.prefix_lm"} for end in ("", "_cycles")},
             "exaone": {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"},
             "minicpm3": {"rope.scaling.attn_factor", "rope.scaling.original_context_length"},
             "granite_swa_defaults": {"attention.rope_pattern"}, "granitemoe_swa_defaults": {"attention.rope_pattern"}}


def seen(name, **changes):
    case = load_case(name)
    checkpoint = memory_checkpoint(case.configs[0] | changes, case.tensors)
    return as_gguf(checkpoint, network.choose_spec(checkpoint)), checkpoint


@pytest.mark.parametrize("name", [name for name in WRITTEN if name in gguf_names()])
@pytest.mark.thin(5)
def test_tensors_and_metadata_are_those_of_the_converter(name):
    ours, theirs = seen(name)[0], gguf_checkpoint(load_case(name))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        assert ours.tensors[key].shape == tensor.shape, key
        if key not in OTHER_ROWS.get(name, ()):
            np.testing.assert_allclose(ours.tensors[key].f32(), tensor.f32(), 2e-6, err_msg=key)
    architecture = theirs.config["general.architecture"]
    a, b = ({key.removeprefix(f"{architecture}."): value for key, value in found.config.items()
             if not key.startswith("general.") or key == "general.architecture"} for found in (ours, theirs))
    skipped = {*OPTIONAL, *OTHERWISE.get(name, ())}
    assert a.keys() - skipped == b.keys() - skipped
    for key in a.keys() & b.keys() - OTHERWISE.get(name, set()):
        assert a[key] == (pytest.approx(b[key], rel=1e-6) if isinstance(b[key], float) else b[key]), key


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in gguf_names() or name in OTHER_ROWS])
@pytest.mark.thin(6)
def test_the_same_numbers_come_out(name):
    case, (ours, source) = load_case(name), seen(name)
    ids = case.inputs[0]["ids"]
    found = [run(Program(built, WeightSource(built, checkpoint)), ids, list(built.outputs)[-1])
             for checkpoint in (ours, source)
             for built in [network.build(network.choose_spec(checkpoint), checkpoint)]]
    assert relative_error(*found) < 1e-4


def families():
    """Specs that detect both a configuration and a GGUF architecture."""
    return [spec.name for spec in list_specs() if {"hf", "gguf"} <= set(namings(spec)) and spec.section("detect")
            and spec.type != "draft" and spec.name not in PATTERNS]


@pytest.mark.parametrize("name", families())
@pytest.mark.thin(8)
def test_toys_of_every_family_keep_their_numbers(name, monkeypatch):
    spec = load_spec(name)
    monkeypatch.setitem(toy.SIZES, "experts", 4 if load_spec(name).section("moe") else 0)
    for kv_heads in (2, 4):
        monkeypatch.setitem(toy.SIZES, "kv_heads", kv_heads)
        monkeypatch.setitem(toy.SIZES, "window_size", 0)
        source = toy.toy_checkpoint(spec, "hf", full=False)
        ours = as_gguf(source, spec)
        output = {"decoder": "logits", "encoder": "hidden", "encoder-decoder": "encoder_hidden"}[spec.type]
        more = {"encoder_ids": toy.ids(12)} if output == "encoder_hidden" else {}
        found = []
        for checkpoint, chosen in ((ours, network.choose_spec(ours)), (source, spec)):
            built = network.build(chosen, checkpoint)
            found.append(run(Program(built, WeightSource(built, checkpoint)), toy.ids(12), output, **more))
        assert relative_error(*found) < 1e-4


def with_an_output_matrix():
    """Specs of architectures whose readers require an output matrix."""
    return [name for name in families() if "output" in load_spec(name).section("gguf")["written"]]


@pytest.mark.parametrize("name", with_an_output_matrix())
def test_tied_tables_are_written_twice_where_readers_want_an_output_matrix(name, monkeypatch):
    monkeypatch.setitem(toy.SIZES, "window_size", 0)
    spec = load_spec(name)
    source = toy.toy_checkpoint(spec, "hf", full=False)
    assert network.build(spec, source, fuse=False).entries["main"][-1].weights["weight"] == "token_embd.weight"
    tensors = as_gguf(source, spec).tensors
    np.testing.assert_array_equal(tensors["output.weight"].f32(), tensors["token_embd.weight"].f32())


def test_tied_tables_are_written_once():
    assert load_case("qwen2").configs[0]["tie_word_embeddings"]
    assert "output.weight" not in seen("qwen2")[0].tensors


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.thin(3)
def test_what_gguf_has_no_word_for_is_refused(name):
    with pytest.raises(RequestError, match="cannot express this model.*safetensors stores the whole model") as found:
        seen(name)
    assert REFUSED[name] in str(found.value)


@pytest.mark.parametrize("name", ["opt", "m2m100", "roberta"])
def test_a_family_without_an_architecture_is_refused(name):
    with pytest.raises(RequestError, match="no architecture of GGUF files is known for spec"):
        seen(name)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe"])
def test_what_would_be_refused_is_written_without_the_number_that_has_no_word(name):
    ours, source = seen(name, time_step_min=0.0)
    ids = load_case(name).inputs[1]["ids"]
    found = [run(Program(built, WeightSource(built, checkpoint)), ids, "logits" if "logits" in built.outputs
                 else "hidden") for checkpoint in (ours, source)
             for built in [network.build(network.choose_spec(checkpoint), checkpoint)]]
    assert relative_error(*found) < 1e-4


def test_heads_that_take_key_heads_in_turn():
    """Rows and columns of value heads are reordered in every tensor; the results are those of the source."""
    ours, source = seen("qwen3_5")
    theirs = source.tensors["model.layers.0.linear_attn.in_proj_z.weight"].f32()
    heads = [0, 3, 1, 4, 2, 5]  # of 6 that share 2 key heads
    np.testing.assert_array_equal(ours.tensors["blk.0.attn_gate.weight"].f32().reshape(6, -1, 48),
                                  theirs.reshape(6, -1, 48)[heads])
    out = source.tensors["model.layers.0.linear_attn.out_proj.weight"].f32()
    np.testing.assert_array_equal(ours.tensors["blk.0.ssm_out.weight"].f32().reshape(48, 6, -1),
                                  out.reshape(48, 6, -1)[:, heads])


def test_a_rank_that_follows_from_the_width_is_written_as_a_number():
    case = load_case("mamba")
    shapes = {name: {"x_proj": (shape[0] - 2, shape[-1]), "dt_proj": (shape[0], 3)}.get(name.split(".")[-2], shape)
              if len(shape) == 2 else shape for name, shape in case.tensors.items()}
    source = memory_checkpoint(case.configs[0] | {"time_step_rank": "auto"}, shapes)
    assert as_gguf(source, network.choose_spec(source)).config["mamba.ssm.time_step_rank"] == 3


def test_bases_by_kind_of_layer_are_not_written_where_readers_take_one():
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(RequestError, match="cannot express this model: blk.3.angles: step is rope_angles"):
        seen("olmo3", rope_scaling=None, rope_parameters=kinds | {"sliding_attention": {"rope_theta": 1e3}})
    ours, _ = seen("olmo3", rope_scaling=None, rope_parameters=kinds | {"sliding_attention": {"rope_theta": 1e4}})
    assert "olmo2.rope.freq_base_swa" not in ours.config


def test_a_window_as_long_as_the_context_is_none():
    ours, source = seen("mistral", sliding_window=64)
    assert network.build(network.choose_spec(source), source).facts["context"] == 64
    assert "llama.attention.sliding_window" not in ours.config


def test_a_spec_of_ones_own_may_leave_a_window_out(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "llama"\n[attention]\nwindow = 0\n')
    case = load_case("mistral")
    source = memory_checkpoint(case.configs[0], case.tensors)
    ours = as_gguf(source, load_spec(tmp_path / "mine.toml"))
    assert network.choose_spec(ours).name == "llama" and "output.weight" in ours.tensors


def test_types_of_tensors():
    """Large matrices keep their type; tensors that other programs add, and routers, are F32."""
    ours = seen("mixtral")[0]
    kinds = {name: tensor.type.name for name, tensor in ours.tensors.items()}
    assert kinds["token_embd.weight"] == kinds["blk.0.ffn_down_exps.weight"] == "F16"
    assert {kinds[f"blk.0.{name}.weight"] for name in ("ffn_gate_inp", "attn_norm", "attn_k")} == {"F32"}


def test_divisors_of_frequencies_are_written_where_readers_take_them():
    """The table `written` is not inherited: readers of another architecture may ignore the tensor."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}
    assert "rope_freqs.weight" in seen("llama3_scaled")[0].tensors
    assert load_spec("qwen2").section("gguf")["written"] == {}
    with pytest.raises(RequestError, match="a rotary frequency is what the source says, and would be read as another"):
        seen("qwen2", rope_scaling=scaling)
