"""Wrong, impossible and hostile values in config.json: an error of one line that names the key, or a network that runs.
"""

import ast
import copy
import json
import tracemalloc
import warnings
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from numflow import network
from numflow.errors import NumflowError, SpecError
from numflow.network import WeightSource
from numflow.reference.program import Program
from numflow.spec.schema import SECTIONS
from tests.specs.case import load_case, memory_checkpoint, names, run

VALUES = [5, {}, [], float("nan"), float("inf"), -1, 0, "x", 1e20, None, True, [1, [0]], "y" * 5000, 0.5, 10**9, 10**20,
          {"a": 1}, [{}] * 3, -0.5, 1e-30, 3e7]


def built(case, config):
    checkpoint = memory_checkpoint(config, case.tensors)
    return network.build(network.choose_spec(checkpoint), checkpoint), checkpoint


def paths(table, before=()):
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def changed(config, path, value):
    config = copy.deepcopy(config)
    table = config
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return config


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * bool(i % 8))
                                  for i, name in enumerate(names())])
@pytest.mark.thin(24)
def test_any_value_under_any_key_is_one_line_or_computes(name):
    """Every key of a family gets an unsuitable value, a different one in each family."""
    case = load_case(name)
    for path in paths(case.configs[0]):
        for turn in range(2):
            value = VALUES[crc32(f"{name} {path} {turn}".encode()) % len(VALUES)]
            try:
                made, checkpoint = built(case, changed(case.configs[0], path, value))
            except NumflowError as error:
                assert "\n" not in str(error) and len(str(error)) < 1500, (path, value)
                continue
            ids = [token % made.facts["vocabulary"] for token in case.inputs[0]["ids"][: min(6, made.facts["context"])]]
            program = Program(made, WeightSource(made, checkpoint))
            with warnings.catch_warnings(action="ignore"):
                for output in made.outputs:
                    encoder = ids if made.facts["type"] == "encoder-decoder" else None
                    assert np.isfinite(run(program, ids, output, encoder_ids=encoder)).all(), (path, value)


@pytest.mark.parametrize(("name", "key", "value", "message"), [
    ("mistral", "num_attention_heads", float("nan"), "attention.heads: expected a whole number of 1 or more"),
    ("mistral", "num_attention_heads", True, "attention.heads: expected a whole number of 1 or more"),
    ("mistral", "num_hidden_layers", float("inf"), "num_hidden_layers of .* is inf; expected a whole number of 1"),
    ("mistral", "num_hidden_layers", 10**20, "stack.layers"),
    ("mistral", "hidden_act", {}, "ffn.activation: expected one of .*, found {}"),
    ("mistral", "rope_theta", 0, "rope.base: expected a finite number above 0"),
    ("mistral", "rope_theta", float("inf"), "rope.base: expected a finite number above 0"),
    ("mistral", "rope_theta", 1e-300, r"expected frequencies of up to 1e\+30.*from rope_theta of .*config"),
    ("llama_linear", "rope_scaling.factor", 1e-300, r"frequencies of up to .*from rope_scaling.factor, "),
    ("mistral", "rms_norm_eps", -1e-5, "norm.eps: expected a finite number above 0 up to 1"),
    ("mistral", "rms_norm_eps", float("nan"), "norm.eps"),
    ("mistral", "sliding_window", -5, "attention.window: expected a whole number of 0 or more"),
    ("mistral", "sliding_window", 4.5, "attention.window: expected a whole number of 0 or more"),
    ("mistral", "tie_word_embeddings", "false", "tie_word_embeddings of .* is 'false'; expected one of true, false"),
    ("mistral", "max_position_embeddings", 0, "context: expected a whole number of 1 or more"),
    ("llama_linear", "rope_scaling.factor", 0, "rope.factor: expected a finite number above 0"),
    ("llama_yarn", "rope_scaling.beta_fast", -1, "rope.beta_fast"),
    ("phi4_mini", "rope_scaling.short_factor", [1, [0]] * 4, "rope.short_factor: expected a list of numbers"),
    ("phi4_mini", "rope_scaling.long_factor", [0.0] * 8, "rope.long_factor: expected a list of numbers"),
    ("gemma2", "final_logit_softcapping", -1, "head.softcap"),
    ("granite", "residual_multiplier", 1e20, "block.residual_scale"),
    ("gpt_oss", "num_experts_per_tok", -1, r"moe.top_k: .*, found -1 \(from num_experts_per_tok of .*config.json\)"),
    ("mistral", "num_key_value_heads", 3,
     r"multiple of attention.kv_heads 3, found 4 \(from num_attention_heads, num_key_value_heads of .*config.json\)"),
    ("mamba2", "n_groups", 4, r"recurrent.heads: .*, found 6 \(from n_groups, num_heads of .*config.json\)"),
    ("qwen3_moe", "num_experts_per_tok", 10**9, "moe.top_k"),
    ("deepseek_v3", "n_group", 3, "moe.experts: expected a multiple of moe.groups 3"),
    ("deepseek_v3", "topk_group", 10**6, "moe.top_groups"),
    ("deepseek_v32", "max_position_embeddings", 10**9, "an index has up to 4194304 positions"),
    ("minimax_m3_text_blocks", "index_n_heads", 2,
     "indexer.block: expected as many index heads as key heads 1, .*, found 2"),
    ("minimax_m3_text_blocks", "index_local_blocks", 4, "indexer.local: expected up to indexer.top_k 3, found 4"),
    ("minimax_m3_blocks", "text_config.sparse_attention_config.sparse_score_type", "mean",
     "sparse_score_type of .* is 'mean'; expected one of max"),
    ("minimax_m3_blocks", "text_config.sparse_attention_config.sparse_init_block", 1,
     "sparse_init_block of .* is 1; expected one of 0"),
    ("bert", "layer_norm_eps", 0, "norm.eps"),
    ("gemma2", "layer_types", ["full"] * 3, r"layer_types\[0\] of .* is 'full'; expected one of full_attention"),
    ("lfm2", "layer_types", [3] * 4, r"layer_types\[0\] of .* is 3; expected one of full_attention, conv"),
    ("exaone_moe", "mlp_layer_types", ["dense", "thick", "dense"], r"mlp_layer_types\[1\] .*expected one of dense"),
    ("glm_moe_dsa", "indexer_types", ["full", "half", "full"], r"indexer_types\[1\] .*expected one of full, shared"),
    ("recurrent_gemma", "block_types", ["conv"], r"block_types\[0\] .*expected one of recurrent, attention"),
    ("nemotron_h", "hybrid_override_pattern", "MX*M-", "mixer.kind: expected one of .*, found 'X'"),
    ("qwen3_5", "layer_types", ["full_attention"] * 2, "layer_types of .* has 2; expected a list of 3 items, one for"),
    ("afmoe", "layer_types", "full_attention", "layer_types of .* has 14; expected a list of 3 items"),
    ("cwm", "layer_types", [], "layer_types of .* has 0; expected a list of 3 items"),
    ("gemma3n", "activation_sparsity_pattern", [0.9] * 9, "activation_sparsity_pattern of .* has 9; expected a list"),
    ("kimi_linear", "linear_attn_config.full_attn_layers", [99],
     r"linear_attn_config.full_attn_layers\[0\] of .*config.json is 99; expected a whole number from 1 to 3"),
    ("kimi_linear", "linear_attn_config.full_attn_layers", [2, 3], "mixer.kind: .*found 'in both lists'.*kda_layers"),
    ("kimi_linear", "linear_attn_config.kda_layers", [1], "mixer.kind: .*found 'in no list' .*kda_layers"),
    ("bamba", "attn_layer_indices", [-1], r"attn_layer_indices\[0\] of .* is -1; expected a whole number from 0 to 2"),
    ("lfm2", "full_attn_idxs", [1, 4], r"full_attn_idxs\[1\] of .* is 4; expected a whole number from 0 to 3"),
    ("qwen3_next", "mlp_only_layers", [99], r"mlp_only_layers\[0\] of .* is 99; expected a whole number from 0 to 2"),
    ("afmoe", "global_attn_every_n_layers", 0, "global_attn_every_n_layers of .* is 0; expected a whole number of 1"),
    ("gemma4", "num_kv_shared_layers", 5, "num_kv_shared_layers of .* is 5; expected a whole number from 0 to 3"),
    ("ernie4_5_moe", "moe_layer_end_index", 99, "moe_layer_end_index of .* is 99; expected a whole number from -1"),
    ("jamba", "attn_layer_offset", 4, "attn_layer_offset of .* is 4; expected a whole number from 0 to 2"),
    ("llama4", "no_rope_layers", [1, 1], "no_rope_layers of .* has 2; expected a list of 0 or 4 items"),
    ("llama4", "no_rope_layers", [1, 1, 2, 0], r"no_rope_layers\[2\] of .* is 2; expected one of 0, 1"),
    ("hunyuan_v1_moe", "moe_topk", [2] * 4, "moe.top_k: a list of 4 values, but there are 3 layers"),
    ("nemotron_h", "num_hidden_layers", 7, "num_hidden_layers of .* is 7; expected a whole number from 5 to 5"),
    ("modernbert", "global_attn_every_n_layers", -3, "global_attn_every_n_layers of .* is -3; expected a whole number"),
    ("minimax_m2", "rotary_dim", 18, "rope.dims: expected up to 16, the columns of a head in pairs, found 18"),
    ("solar_open", "partial_rotary_factor", 0.6, "rope.dims: expected an even number with scaling 'yarn', found 9"),
])
def test_a_value_that_no_model_has_is_refused_by_name(name, key, value, message):
    case = load_case(name)
    with pytest.raises(SpecError, match=message) as error:
        built(case, changed(case.configs[0], tuple(key.split(".")), value))
    assert "\n" not in str(error.value)


def test_errors_name_options_that_there_are():
    """Messages name spec options that exist; the names are only looked up when an error is raised."""
    named = [ast.literal_eval(option) for path in Path(network.__file__).parent.rglob("*.py")
             for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "SpecError" and len(call.args) == 2
             for option in call.args[1].elts if isinstance(option, ast.Constant)]
    assert len(named) > 20
    for section, key in (option.split(".") for option in named):
        assert key in SECTIONS[section], (section, key)


@pytest.mark.parametrize(("key", "value"), [
    ("architectures", 5), ("architectures", [5]), ("architectures", {"a": 1}), ("model_type", ["llama"]),
])
def test_names_of_the_model_are_texts(key, value):
    case = load_case("mistral")
    with pytest.raises(SpecError, match=f"{key}: expected .*, found"):
        built(case, {**case.configs[0], key: value})


def test_the_message_says_from_which_key_of_which_file(tmp_path):
    case = load_case("mistral")
    checkpoint = memory_checkpoint({**case.configs[0], "num_attention_heads": -3}, case.tensors)
    checkpoint.files["config"] = tmp_path / "config.json"
    with pytest.raises(SpecError) as error:
        network.build(network.choose_spec(checkpoint), checkpoint)
    assert str(error.value).endswith(f"found -3 (from num_attention_heads of {tmp_path / 'config.json'})")


@pytest.mark.parametrize(("name", "key", "value"), [
    ("phi2", "partial_rotary_factor", 3e7), ("gptj", "rotary_dim", 10**9), ("gpt_neox_serial", "rotary_pct", 1e7),
    ("m2m100", "max_position_embeddings", 2 * 10**7), ("m2m100", "d_model", 10**8),
    ("bloom", "num_attention_heads", 10**8), ("falcon_40b", "num_attention_heads", 10**8),
    ("falcon_40b", "num_kv_heads", 10**8),
    ("gpt_bigcode_or_starcoder", "n_head", 10**8), ("gpt_oss", "intermediate_size", 10**8), ("mpt", "n_heads", 10**8),
    ("deepseek_v2", "num_attention_heads", 10**8), ("deepseek_v2", "qk_nope_head_dim", 10**8),
    ("deepseek_v2", "v_head_dim", 10**8), ("qwen3_moe", "num_experts", 10**8), ("t5", "num_heads", 10**8),
    ("t5", "relative_attention_num_buckets", 10**8), ("llama_yarn", "head_dim", 10**9), ("bart", "d_model", 10**9),
])
@pytest.mark.thin(2)
def test_a_large_value_makes_nothing_large(name, key, value):
    case = load_case(name.partition("_or_")[2] or name)
    config = {**case.configs[0], key: value}
    tracemalloc.start()
    try:
        with pytest.raises(NumflowError) as error:
            built(case, config)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("role", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [{"a": 1}, "x", [1, [2]], [{}], 1.5, True])
def test_ids_of_tokens_are_whole_numbers(tmp_path, role, value):
    import numflow
    from tests.quant.small import write_model

    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, role: value}))
    with pytest.raises(NumflowError, match=f"config.json: {role}: expected a token's id"):
        numflow.load(folder, backend="reference")


@pytest.mark.parametrize("module", ["model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"])
def test_a_tensor_without_dimensions_is_refused_by_name(module):
    case = load_case("mistral")
    case.tensors[module] = ()
    with pytest.raises(SpecError, match=f"tensor '{module}' is \\[\\], but spec"):
        built(case, case.configs[0])
