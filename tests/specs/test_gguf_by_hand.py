"""GGUF files as llama.cpp's converter writes them, of families whose tiny model it cannot convert: tensors are renamed
and rearranged here, and the results must be those of the published names.

The converter rounds weights of BitNet, detects MiniMax by keys that its class does not write, has no name for a dense
layer of Kimi Linear as the class saves it, and turns stored tensors of Apertus into metadata.
"""

import math
import re

import numpy as np
import pytest

from numflow import network
from numflow.errors import SpecError
from numflow.network import WeightSource
from numflow.network.gguf.as_gguf import as_gguf
from numflow.reference.program import Program
from numflow.spec import load_spec
from numflow.spec.resolve import Resolved
from tests.specs.case import load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values

COMMON = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
          "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "attention_layernorm": "attn_norm",
          "feedforward_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
EXPERTS = {"block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias", "block_sparse_moe.gate": "ffn_gate_inp",
           "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
           "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
           "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp",
           "block_sparse_moe.gate_proj": "ffn_gate", "block_sparse_moe.up_proj": "ffn_up",
           "block_sparse_moe.down_proj": "ffn_down"}
STACKS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def renamed(name, *tables):
    for old, new in sorted({key: value for table in tables for key, value in table.items()}.items(),
                           key=lambda pair: -len(pair[0])):
        name = re.sub(rf"(^|\.){re.escape(old)}(\.|$)", rf"\g<1>{new}\2", name)
    return name


def stacked(tensors):
    """Single experts stacked to one tensor of each kind."""
    found = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(blk\.\d+\.)block_sparse_moe\.experts\.\d+\.(w\d)\.weight", name)
        found.setdefault(match[1] + STACKS[match[2]] + ".weight" if match else name, []).append(array)
    return {name: parts[0] if len(parts) == 1 else np.stack(parts) for name, parts in found.items()}


def common(architecture, config, **more):
    keys = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size", "context_length":
            "max_position_embeddings", "feed_forward_length": "intermediate_size", "attention.head_count":
            "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta", "vocab_size":
            "vocab_size", "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "attention.key_length": "head_dim", "attention.value_length": "head_dim"}
    found = {key: config[old] for key, old in keys.items() if old in config} | more
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in found.items()}}


def bitnet(config, tensors):
    names = {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"}
    metadata = common("bitnet", config, **{"rope.scaling.type": "linear", "rope.scaling.factor": 1.0})
    return metadata, {renamed(name, COMMON, names): array for name, array in tensors.items()}


def apertus(config, tensors):
    """Parameters of the activation become metadata keys without the architecture's prefix."""
    numbers = {name: float(array.reshape(-1)[0]) for name, array in tensors.items() if ".act_fn." in name}
    lists = {f"xielu.{part}": [number for name, number in numbers.items() if name.endswith(part)]
             for part in ("alpha_p", "alpha_n", "beta", "eps")}
    names = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    return common("apertus", config, **{"rope.dimension_count": 16}) | lists, {
        renamed(name, COMMON, names): array for name, array in tensors.items() if name not in numbers}


def minimax(config, tensors):
    names = {"self_attn.qkv_proj": "attn_qkv", "self_attn.output_gate": "attn_gate", "self_attn.norm": "attn_norm_2",
             "self_attn.out_proj": "attn_output"}
    metadata = common("minimax-01", config, **{"residual_scale": 1.5, "rope.dimension_count": 12,
                                               "attention.recurrent_layers": [True, False, True]})
    return metadata, stacked({renamed(name, COMMON, EXPERTS, names): array for name, array in tensors.items()
                              if not name.endswith(("_decay", "slope_rate"))})


def kimi(config, tensors):
    """Decay rates are stored instead of their logarithms, convolutions have four dimensions, the latent matrix is split
    in keys and values, and its keys are transposed."""
    linear, heads, nope = config["linear_attn_config"], config["num_attention_heads"], config["qk_nope_head_dim"]
    names = {f"self_attn.{old}": f"ssm_{new}" for old, new in (
        ("q_conv1d", "conv1d_q"), ("k_conv1d", "conv1d_k"), ("v_conv1d", "conv1d_v"), ("A_log", "a"),
        ("dt_bias", "dt.bias"), ("f_a_proj", "f_a"), ("f_b_proj", "f_b"), ("g_a_proj", "g_a"), ("g_b_proj", "g_b"),
        ("b_proj", "beta"), ("o_norm", "norm"))}
    names |= {"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm"}
    found = {}
    for name, array in tensors.items():
        new = renamed(name, COMMON, EXPERTS, names)
        if name.endswith("A_log"):
            array = -np.exp(array)
        elif "conv1d" in name:
            array = array.reshape(1, array.shape[0], 1, -1)
        elif "kv_b_proj" in name:
            both, place = array.reshape(heads, -1, array.shape[1]), new.split("self_attn")[0]
            found[place + "attn_k_b.weight"] = both[:, :nope].swapaxes(1, 2)
            new, array = place + "attn_v_b.weight", both[:, nope:]
        found[new] = array
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    full = [int(layer + 1 in linear["full_attn_layers"]) for layer in range(config["num_hidden_layers"])]
    return common("kimi-linear", config, **{
        "attention.head_count_kv": full, "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.head_dim": linear["head_dim"], "attention.kv_lora_rank": rank, "rope.dimension_count": rope,
        "attention.key_length": rank + rope, "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"], "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"], "expert_gating_func": 2,
        "expert_feed_forward_length": config["moe_intermediate_size"], "expert_shared_count": 1,
        "leading_dense_block_count": 1, "expert_weights_scale": config["routed_scaling_factor"]}), stacked(found)


# What a family's file cannot say otherwise: its first activation; one factor for what goes on beside every block, none
# for the blocks.
SAID = {"bitnet": {"hidden_act": "silu"}, "minimax": {key: 1.5 if "alpha" in key else 1.0 for key in (
    *(f"{kind}_attn_{part}_factor" for kind in ("linear", "full") for part in ("alpha", "beta")), "mlp_alpha_factor",
    "mlp_beta_factor")}}
FAMILIES = {"bitnet": bitnet, "apertus": apertus, "minimax": minimax, "kimi_linear": kimi}


def both(name):
    """(checkpoint with published names, the same as GGUF, its tensors)."""
    case = load_case(name)
    config = case.configs[0] | SAID.get(name, {})
    if name == "apertus":  # divisors of frequencies are a tensor there, as of other families
        config = {**config, "rope_scaling": {"rope_type": "default"}}
    arrays = {key: values(key, shape).astype(np.float32) for key, shape in case.tensors.items()}
    metadata, stored = FAMILIES[name](config, arrays)
    return (memory_checkpoint(config, case.tensors, make=lambda key, shape: arrays[key]),
            memory_checkpoint(metadata, {key: array.shape for key, array in stored.items()}, "gguf",
                              lambda key, shape: stored[key]), stored)


def logits(checkpoint, ids):
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return run(Program(built, WeightSource(built, checkpoint)), ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_numbers_come_out(name):
    published, gguf, _ = both(name)
    for given in load_case(name).inputs:
        assert relative_error(logits(gguf, given["ids"]), logits(published, given["ids"])) < 2e-5


@pytest.mark.parametrize("name", ["bitnet", "kimi_linear", "minimax"])
def test_the_same_files_are_written(name):
    published, _, stored = both(name)
    ours = as_gguf(published, network.choose_spec(published))
    assert ours.tensors.keys() == stored.keys()
    for key, array in stored.items():
        assert [n for n in ours.tensors[key].shape if n != 1] == [n for n in array.shape if n != 1], key
        np.testing.assert_allclose(ours.tensors[key].f32().reshape(-1), array.reshape(-1), 2e-6, err_msg=key)


def test_what_a_file_must_say():
    """Missing values that would give another model are refused, as is a scale stored with a matrix."""
    _, gguf, _ = both("apertus")
    del gguf.config["xielu.alpha_n"]
    with pytest.raises(SpecError, match="xielu_negative: .* has no 'apertus.xielu.alpha_n' or 'xielu.alpha_n'"):
        network.build(network.choose_spec(gguf), gguf)
    _, gguf, stored = both("bitnet")
    stored["blk.1.attn_q.scale"] = np.ones(1, np.float32)
    shapes = {key: array.shape for key, array in stored.items()}
    scaled = memory_checkpoint(gguf.config, shapes, "gguf", lambda key, shape: stored[key])
    with pytest.raises(SpecError, match=r"blk\.1\.attn_q\.scale"):
        network.build(network.choose_spec(scaled), scaled)


@pytest.mark.parametrize("name", ["llama", "olmo2", "hunyuan_dense", "apertus", "chatglm2", "falcon", "gpt_neox",
                                  "phi2"])
def test_a_factor_of_the_rotary_positions_is_linear_where_the_file_says_no_more(name):
    """Files of 2023 have the factor as rope.scale_linear."""
    spec = load_spec(name)
    architectures = spec.section("detect")["gguf"]
    architecture = architectures if isinstance(architectures, str) else architectures[0]
    for more, expected in (({}, ("none", 1)), ({"scale_linear": 4.0}, ("linear", 4)),
                           ({"scaling.factor": 2.0}, ("linear", 2)),
                           ({"scaling.factor": 2.0, "scale_linear": 4.0}, ("linear", 2)),
                           ({"scaling.factor": 2.0, "scaling.type": "none"}, ("none", 2))):
        config = {"general.architecture": architecture, f"{architecture}.context_length": 64,
                  **{f"{architecture}.rope.{key}": value for key, value in more.items()}}
        found = Resolved(spec, config, "gguf")
        assert found.option("rope", "scaling", 0) == expected[0]
        assert expected[0] == "none" or found.option("rope", "factor", 0) == expected[1]


def test_options_that_files_of_other_programs_have():
    """Gemma 3's softcap and rotary scaling (only of layers without a window), and the position of Falcon-H1's norm."""
    metadata = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in {
        "block_count": 12, "context_length": 64, "embedding_length": 64, "attention.head_count": 4,
        "attention.sliding_window": 8, "final_logit_softcapping": 5.0, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0}.items()}}
    found = Resolved(load_spec("gemma3"), metadata, "gguf")
    assert found.option("head", "softcap", None) == 5.0
    assert [found.option("rope", "scaling", layer) for layer in (0, 5)] == ["yarn", "yarn"]
    assert [found.option("rope", "factor", layer) for layer in (0, 5)] == [1, 4]
    assert [found.option("rope", "attention_factor", layer) for layer in (0, 5)] == [1, 0.1 * math.log(4) + 1]
    for has, expected in ((True, "after_gate"), (False, "none")):
        found = Resolved(load_spec("falcon_h1"), {"general.architecture": "falcon-h1"}, "gguf",
                         lambda name, layer, stack, has=has: has and name == "ssm_norm.weight")
        assert found.option("recurrent", "norm", 0) == expected
        assert found.option("recurrent", "log_rates", 0) is False


def test_attention_in_both_directions_is_refused_where_the_family_has_it_in_one():
    for name, architecture in (("llama", "llama"), ("qwen2", "qwen2"), ("lfm2", "lfm2"), ("bert", "bert")):
        found = Resolved(load_spec(name), {"general.architecture": architecture, f"{architecture}.block_count": 2,
                                           f"{architecture}.attention.causal": False}, "gguf")
        if name == "bert":
            assert found.parameter("one_way") is False
            continue
        with pytest.raises(SpecError, match=rf"{architecture}\.attention\.causal of .* is False; expected true"):
            found.check_limits()
