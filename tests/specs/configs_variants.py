"""Tiny models with configuration values that few files of a family have: name -> (case, changed keys, removed keys,
options).

The case is one of configs.py and options are its options. Three more options: "salt", the suffix of the names that
weights are derived from, where the usual weights let rounding decide between experts or signs; "asked", further changes
for transformers, where its present version does not compute what the file says; "saved", false where the file that
transformers writes means something else than the file that it has read.
"""

import copy

from tests.specs.configs import CASES

SLIDING, FULL, CHUNKED, GELU = "sliding_attention", "full_attention", "chunked_attention", "gelu_pytorch_tanh"
MIXED = [FULL, SLIDING, SLIDING]
SPARSE = ["sparse", "dense", "sparse"]
SALTED = {"salt": "~1"}
SHORT_TEXTS = {"lengths": (9, 20)}

# Which layers see a window, route tokens to experts or keep a state.
LAYERS: dict[str, tuple] = {
    "deepseek_v32_mlp_layers": ("deepseek_v32", {"index_n_heads": 24, "mlp_layer_types": SPARSE}),
    "deepseek_v3_layer_freq": ("deepseek_v3", {"moe_layer_freq": 2, "rms_norm_eps": 1e-3}),
    "exaone4_pattern": ("exaone4", {"sliding_window": 5, "sliding_window_pattern": 2}, ("layer_types",)),
    "exaone_moe_pattern": ("exaone_moe", {
        "sliding_window": 4, "sliding_window_pattern": 2, "num_hidden_layers": 5, "first_k_dense_replace": 3,
        "tie_word_embeddings": True}, ("layer_types", "mlp_layer_types")),
    "gemma2_layer_types": ("gemma2", {"layer_types": MIXED, "sliding_window": 5}),
    "gemma3_layer_types": ("gemma3", {"layer_types": MIXED, "sliding_window": 5}),
    "gemma4_defaults": ("gemma4", {"num_hidden_layers": 13, "num_kv_shared_layers": 5, "attention_bias": True,
                                   "tie_word_embeddings": False}, ("layer_types",), SALTED),
    "glm4_moe_lite_dense": ("glm4_moe_lite", {
        "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 2, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
            "mscale_all_dim": 0.8}}, ("mlp_layer_types",)),
    "jamba_window": ("jamba", {"sliding_window": 4}),
    "kimi_linear_defaults": ("kimi_linear", {
        "num_hidden_layers": 6, "mlp_layer_types": [*SPARSE, *SPARSE], "linear_head_dim": 12, "linear_num_heads": 3,
        "linear_conv_kernel_dim": 4}, ("linear_attn_config", "first_k_dense_replace")),
    "kimi_linear_full": ("kimi_linear", {"linear_attn_config": {
        "full_attn_layers": [1, 2, 3], "kda_layers": [], "head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 4}}),
    "lfm2_full": ("lfm2", {}, ("full_attn_idxs", "layer_types")),
    "llama4_layer_types": ("llama4", {"moe_layers": [], "attention_chunk_size": 6,
                                      "layer_types": [FULL, CHUNKED, FULL, CHUNKED]}),
    "minimax_m2_window": ("minimax_m2", {"sliding_window": 4}),
    "modernbert_layer_types": ("modernbert", {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]}),
    "qwen3_next_dense": ("qwen3_next", {"num_experts": 0}),
    "qwen2_moe_alternating": ("qwen2_moe", {"num_hidden_layers": 4, "sliding_window": 5, "use_sliding_window": True},
                              ("max_window_layers",)),
    "qwen3_moe_window": ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True}),
    "qwen2_moe_layer_types": ("qwen2_moe", {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 5,
                                            "use_sliding_window": True}),
}
# Activations that are always the same in published files.
ACTIVATIONS: dict[str, tuple] = {
    "arcee_gelu": ("arcee", {"hidden_act": GELU}),
    "bamba_gelu": ("bamba", {"attn_layer_indices": [1, 2], "rope_theta": 500.0, "hidden_act": GELU, "mamba_expand": 3,
                             "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_n_groups": 3}),
    "granitemoehybrid_gelu": ("granitemoehybrid_dense", {
        "hidden_act": GELU, "layer_types": ["attention", "attention", "mamba"], "position_embedding_type": None}),
    "jais2_gelu": ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
                             "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "jamba_gelu": ("jamba", {
        "num_hidden_layers": 4, "hidden_size": 52, "hidden_act": GELU, "num_experts": 5, "num_experts_per_tok": 3},
        ("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset")),
    "kimi_linear_gelu": ("kimi_linear", {"first_k_dense_replace": 0, "attention_bias": True, "rms_norm_eps": 1e-3,
                                         "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "hidden_act": GELU}),
    "mamba2_gelu": ("mamba2", {"hidden_size": 40, "num_heads": 10, "head_dim": 8, "n_groups": 2,
                               "time_step_limit": [0.0, 0.5], "hidden_act": "gelu", "time_step_min": 0.6}),
    "mamba_inner": ("mamba", {"intermediate_size": 60}, (), {"saved": False}),
    "mamba_gelu": ("mamba", {"expand": 3, "hidden_size": 36, "conv_kernel": 2, "time_step_rank": 1,
                             "hidden_act": "gelu"}),
    "minimax_gelu": ("minimax", {"layer_types": [FULL, FULL, "linear_attention"], "num_key_value_heads": 1,
                                 "sliding_window": 5, "rope_theta": 500.0, "hidden_act": GELU}),
    "nemotron_h_gelu": ("nemotron_h_moe", {
        "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4, "mamba_head_dim": 10, "n_shared_experts": 2,
        "mamba_hidden_act": "gelu", "time_step_min": 0.001, "time_step_floor": 0.3,
        "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1}),
    "qwen3_5_gelu": ("qwen3_5", {"num_hidden_layers": 4, "hidden_act": GELU},
                     ("layer_types", "rope_parameters", "full_attention_interval")),
    "qwen3_next_gelu": ("qwen3_next", {
        "num_hidden_layers": 4, "num_experts": 9, "num_experts_per_tok": 1, "mlp_only_layers": [], "hidden_act": GELU,
        "linear_conv_kernel_dim": 2}, ("full_attention_interval", "partial_rotary_factor")),
    "recurrent_gemma_silu": ("recurrent_gemma", {
        "lru_width": None, "hidden_size": 96, "tie_word_embeddings": False, "logits_soft_cap": 5.0,
        "attention_window_size": 64, "hidden_activation": "silu"},
        ("partial_rotary_factor", "block_types", "num_key_value_heads")),
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
BY_WAVELENGTH = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16}
RAMP = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 2.0}
KINDS = {"rope_parameters": {FULL: RAMP | {"rope_theta": 1e4, "attention_factor": 1.3},
                             SLIDING: BY_WAVELENGTH | {"rope_theta": 1e3}}}
SHORT, LONG = ([1 + i / 10 for i in range(8)], [2 + i for i in range(8)])
PHI = {"max_position_embeddings": 512}


def longrope(original: int, short: list[float], long: list[float], short_mscale: float, long_mscale: float) -> dict:
    return {"original_max_position_embeddings": original, "rope_scaling": {
        "type": "longrope", "short_factor": short, "long_factor": long, "short_mscale": short_mscale,
        "long_mscale": long_mscale, "original_max_position_embeddings": original}}


# Odd widths are rounded up. transformers 5.23 and 5.24 take Phi-MoE's short factors for all lengths, 4.57
# and the model's own code do not.
ROTARY: dict[str, tuple] = {
    "albert_same_width": ("albert", {"embedding_size": 64}, (), SHORT_TEXTS),
    "apertus_empty_scaling": ("apertus", {"rope_theta": 5e5, "rope_scaling": {}}),
    "apertus_null_scaling": ("apertus", {"rope_theta": 5e5, "rope_scaling": None}),
    "apertus_scaled_by_class": ("apertus", {"rope_theta": 5e5}, ("rope_scaling",)),
    "deepseek_v32_dynamic": ("deepseek_v32", {
        "index_n_heads": 24, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}),
    "minimax_m3_text_dynamic": ("minimax_m3_text_blocks", {
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}, (), {"lengths": (30, 60)}),
    "gemma_embedding_window_one": ("gemma_embedding", {"sliding_window": 1}, (), SHORT_TEXTS),
    "gemma3_type_passed_over": ("gemma3", {"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 1.3}}),
    "gemma3n_type_passed_over": ("gemma3n", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "gemma3n_ramp": ("gemma3n", {"rope_scaling": RAMP | {"truncate": False}}),
    "gemma3n_long": ("gemma3n", {"rope_scaling": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
        "original_max_position_embeddings": 16}}),
    "gemma3n_long_factor_one": ("gemma3n", {"rope_scaling": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 1.0,
        "original_max_position_embeddings": 16}}),
    "glm_whole_rotary": ("glm", {"partial_rotary_factor": None}, (), {"saved": False}),
    "gpt_neox_odd_dynamic": ("gpt_neox_serial", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.44}}),
    "llama_long_factor_one": ("llama_linear", {"rope_scaling": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 1.0,
        "original_max_position_embeddings": 16}}),
    "llama_linear_attention_factor": ("llama_linear", {"rope_scaling": LINEAR | {"attention_factor": 1.3}}),
    "llama_ramp_factor_null": ("llama_linear", {"rope_scaling": RAMP | {"factor": None}}),
    "nomic_bert_ramp": ("nomic_bert_masked", {"hidden_act": "relu", "rope_parameters": RAMP | {"rope_theta": 1e3}}, (),
                        SHORT_TEXTS),
    "opt_plain_norms": ("opt", {"layer_norm_elementwise_affine": False}),
    "qwen3_next_whole_rotary": ("qwen3_next", {"partial_rotary_factor": None}, (), SALTED | {"saved": False}),
    "rembert_same_width": ("rembert", {"input_embedding_size": 32}, (), SHORT_TEXTS),
    "t5gemma_untied": ("t5gemma", {"tie_word_embeddings": False}, (), SHORT_TEXTS),
    "bamba_rotary": ("bamba", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.45}}, ("attn_rotary_emb", "rope_theta")),
    "cwm_scaled_by_class": ("cwm", {}, ("rope_scaling", "rope_theta")),
    "deepseek_v3_without_shared": ("deepseek_v3", {"n_shared_experts": 0}),
    "gemma3_rope_kinds": ("gemma3", KINDS, ("rope_scaling", "rope_theta", "rope_local_base_freq")),
    "gemma3_ramp": ("gemma3", {"rope_scaling": RAMP}),
    "gemma3n_by_wavelength": ("gemma3n", {"rope_scaling": BY_WAVELENGTH}),
    "gemma3n_scaled": ("gemma3n", {"rope_scaling": LINEAR, "altup_correct_scale": False, "num_kv_shared_layers": 0}),
    "gemma4_rope_kinds": ("gemma4", KINDS, (), SALTED),
    "glm_moe_dsa_half": ("glm_moe_dsa", {"index_n_heads": 24, "rope_interleave": False, "rms_norm_eps": 1e-3}),
    "falcon_linear": ("falcon_7b", {"rope_scaling": {"type": "linear", "factor": 4.0}, "activation": GELU}),
    "gpt_neox_ramp": ("pythia", {"rope_scaling": RAMP}),
    "phi_by_wavelength": ("phi2", {"rope_scaling": BY_WAVELENGTH}),
    "gpt_neox_odd": ("gpt_neox_serial", {"rotary_pct": 0.5, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.19}}),
    "hunyuan_v1_moe_linear": ("hunyuan_v1_moe", {
        "num_experts": 8, "moe_topk": 8, "num_shared_expert": 1, "moe_intermediate_size": 24, "rope_scaling": LINEAR,
        "attention_bias": True}),
    "modernbert_type_passed_over": ("modernbert", {"rope_scaling": {
        "type": "yarn", "factor": 4.0, "attention_factor": 1.3}}),
    "modernbert_rope_kinds": ("modernbert", KINDS),
    "modernbert_scaled": ("modernbert", {"rope_parameters": {
        FULL: {**LINEAR, "rope_theta": 5e3}, SLIDING: {"rope_type": "default", "rope_theta": 200.0}}}),
    "olmo3_rope_kinds": ("olmo3", KINDS, ("rope_scaling", "rope_theta")),
    "phimoe_short": ("phimoe", PHI | longrope(64, SHORT, LONG, 1.25, 1.5)),
    "phimoe_long": ("phimoe", PHI | longrope(16, SHORT, LONG, 1.25, 1.5), (), {
        "lengths": (17, 41), "asked": longrope(64, LONG, SHORT, 1.5, 1.25)}),
    "qwen3_next_odd": ("qwen3_next", {"head_dim": 24, "partial_rotary_factor": 0.375}, (), SALTED),
    "qwen3_rope_twice": ("qwen3", {"rope_theta": 1e4, "original_max_position_embeddings": 32, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}}),
}
# Caps, gates of experts, heads.
OTHERS: dict[str, tuple] = {
    "afmoe_groups": ("afmoe", {"n_group": 3, "topk_group": 2}),
    "afmoe_unnormalized": ("afmoe", {"route_norm": False}),
    "apertus_without_rope": ("apertus", {"hidden_act": "relu2"}, ("rope_scaling", "rope_parameters", "rope_theta")),
    "deepseek_v2_greedy": ("deepseek_v2_lite", {"n_group": 2}),
    "deepseek_v3_half": ("deepseek_v3", {"rope_interleave": False}),
    "ernie4_5_moe_least_sum": ("ernie4_5_moe", {"moe_norm_min": 0.8}),
    "bloom_normed_residual": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "gemma3_capped": ("gemma3", {"final_logit_softcapping": 4.0}),
    "gemma3_scaled": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "hidden_activation": "silu"}),
    "gemma3n_defaults": ("gemma3n", {
        "num_hidden_layers": 6, "intermediate_size": [40, 56, 24, 40, 40, 40], "num_kv_shared_layers": 1,
        "altup_num_inputs": 4, "altup_active_idx": 3, "laurel_rank": 3, "final_logit_softcapping": 3.0,
        "activation_sparsity_pattern": None, "hidden_activation": "silu"}, ("layer_types",)),
    "gemma3n_one_stream": ("gemma3n", {"altup_num_inputs": 1, "altup_active_idx": 0}),
    "gemma4_rope": ("gemma4", {"rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1e5},
        SLIDING: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}}, (), SALTED),
    "glm4_moe_groups": ("glm4_moe", {"n_group": 2, "topk_group": 1}),
    "kimi_linear_sharpened": ("kimi_linear", {"rope_parameters": {"rope_theta": 1e4, "mscale_all_dim": 0.9} | RAMP}),
    "kimi_linear_tied": ("kimi_linear", {"tie_word_embeddings": True}),
    "nanochat_uncapped": ("nanochat", {"num_key_value_heads": 2, "attention_bias": True, "hidden_act": "silu",
                                       "final_logit_softcapping": None, "tie_word_embeddings": True}),
    "nemotron_h_tied": ("nemotron_h", {"tie_word_embeddings": True}),
    # Saved by transformers: the taps of queries, keys and values are dealt out evenly.
    "olmo_hybrid_wide": ("olmo_hybrid", {"linear_value_head_dim": 24, "linear_conv_kernel_dim": 3}),
    "vaultgemma_uncapped": ("vaultgemma", {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
        "hidden_activation": "silu", "tie_word_embeddings": False}, ("layer_types",)),
}
# Values that a file leaves out: those of the class, not those of most families.
LEFT_OUT: dict[str, tuple] = {
    "cwm_by_class": ("cwm", {"rope_theta": 500.0}, ("rope_scaling",)),
    "cwm_plain": ("cwm", {"rope_parameters": {"rope_theta": 500.0}}, ("rope_scaling", "rope_theta")),
    "deepseek_v3_by_class": ("deepseek_v3", {}, ("norm_topk_prob", "routed_scaling_factor")),
    "ernie4_5_by_class": ("ernie4_5", {}, ("rope_theta",)),
    "exaone_moe_by_class": ("exaone_moe", {}, ("sliding_window",)),
    "gemma3n_by_class": ("gemma3n", {}, ("final_logit_softcapping",)),
    "gemma4_by_class": ("gemma4", {"rope_theta": 500.0}, ("rope_parameters",), SALTED),
    "glm_moe_dsa_by_class": ("glm_moe_dsa", {"index_n_heads": 24}, ("rope_parameters",)),
    "gpt_oss_by_class": ("gpt_oss", {}, ("rope_scaling", "rope_parameters")),
    "granitemoehybrid_by_class": ("granitemoehybrid", {"layers_block_type": ["mamba", "attention", "mamba"]}, (
        "layer_types", "rms_norm_eps", "num_experts_per_tok")),
    "kimi_linear_by_class": ("kimi_linear", {}, ("moe_renormalize", "routed_scaling_factor")),
    "mamba2_by_class": ("mamba2", {"num_heads": 8, "head_dim": 12}, ("n_groups",)),
    "ministral3_by_class": ("ministral3", {"rope_theta": 500.0}, ("rope_parameters",)),
    "mixtral_by_class": ("mixtral", {}, ("rope_theta", "num_experts_per_tok")),
}
# A convolution of one tap, which keeps nothing of a text.
ONE_TAP: dict[str, tuple] = {
    "lfm2_one_tap": ("lfm2_biased", {"conv_L_cache": 1}),
    "mamba_one_tap": ("mamba", {"conv_kernel": 1}),
    "mamba2_one_tap": ("mamba2", {"conv_kernel": 1, "hidden_act": "gelu", "time_step_limit": [
        {"__float__": "Infinity"}, 0.3]}),
    "olmo_hybrid_one_tap": ("olmo_hybrid", {"linear_value_head_dim": 24, "linear_conv_kernel_dim": 1}),
    "qwen3_next_one_tap": ("qwen3_next", {"linear_conv_kernel_dim": 1}, (), SALTED),
    "zaya_one_tap": ("zaya", {"cca_time0": 1}),
}
# Tokens that use no expert, tables of several stacks, layers of several groups.
FEWER_AND_MORE: dict[str, tuple] = {
    "albert_groups": ("albert", {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 3}, (),
                      SHORT_TEXTS),
    "bart_untied": ("bart", {"tie_word_embeddings": False}, (), SHORT_TEXTS),
    "deberta_v2_unrelated": ("deberta_v2", {"relative_attention": False}, (), SHORT_TEXTS),
    "bloom_old_width": ("bloom", {"hidden_size": 24, "n_embed": 48, "n_inner": 24}),
    "gemma_relu2": ("gemma", {"hidden_act": "relu2"}),
    "longcat_flash_no_expert": ("longcat_flash", {"moe_topk": 0}),
    "marian_tables": ("marian", {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False}, (),
                      SHORT_TEXTS),
    "mixtral_no_expert": ("mixtral", {"num_experts_per_tok": 0}),
    "qwen2_moe_no_expert": ("qwen2_moe", {"num_experts_per_tok": 0}),
    "bailing_hybrid_fractional_bound": ("bailing_hybrid", {"kda_lower_bound": -1.5}),
    "ctrl_last_norm": ("ctrl", {"layer_norm_epsilon": 1e-3}),
    "jina_embeddings_v3_untied": ("jina_embeddings_v3", {"tie_word_embeddings": False}, (), SHORT_TEXTS),
    "led_scale_passed_over": ("led", {"scale_embedding": True}, (), SHORT_TEXTS),
    "glm5_next_shared_epsilon": ("glm5_next_shared", {"rms_norm_eps": 1e-3}),
    "lfm2_vl_passed_over": ("lfm2_vl", {"hidden_act": "gelu", "rms_norm_eps": 1e-2}),
    "mistral_large4_epsilon": ("mistral_large4", {"rms_norm_eps": 1e-3}),
    "seamless_m4t_v2_epsilon": ("seamless_m4t_v2", {"layer_norm_eps": 1e-2}, (), SHORT_TEXTS),
    "switch_all_untied": ("switch_all", {"tie_word_embeddings": False}, (), SHORT_TEXTS),
    "seamless_m4t_untied": ("seamless_m4t", {"tie_word_embeddings": False}, (), SHORT_TEXTS),
}
POSITIONS: dict[str, tuple] = {
    "dots3_note_rope_kinds": ("dots3_note", {"index_n_heads": 24, "rope_parameters": {
        "indexed_attention": RAMP, SLIDING: LINEAR | {"rope_theta": 70.0}}}),
    "dots3_note_scaled": ("dots3_note_full", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "gpt_neox_japanese_ramp": ("gpt_neox_japanese", {"rope_scaling": RAMP | {"partial_rotary_factor": 0.5}}),
    "jina_embeddings_v3_relu": ("jina_embeddings_v3", {"hidden_act": "relu", "rope_scaling": LINEAR}),
    "olmo3_base_of_all": ("olmo3", {"rope_theta": 1e3}, ("rope_scaling",)),
    "olmo3_base_of_whole": ("olmo3", {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 1e3}}},
                            ("rope_scaling", "rope_theta")),
    "phimoe_ramp": ("phimoe", PHI | {"rope_scaling": RAMP | {"short_mscale": 1.25, "long_mscale": 1.5}}),
}
LEFT_OUT |= {
    "bert_by_class": ("bert", {"hidden_size": 96}, ("num_attention_heads", "layer_norm_eps"), SHORT_TEXTS),
    "glm_by_class": ("glm", {"num_key_value_heads": 2}, ("head_dim", "rms_norm_eps")),
    "mistral_by_class": ("mistral", {"num_attention_heads": 16}, ("num_key_value_heads", "rms_norm_eps")),
    "qwen2_by_class": ("qwen2", {"num_attention_heads": 32, "hidden_size": 64}, (
        "num_key_value_heads", "num_hidden_layers", "rms_norm_eps")),
    "stablelm_by_class": ("stablelm_parallel", {}, ("use_parallel_residual",)),
    "starcoder2_by_class": ("starcoder2", {}, ("tie_word_embeddings",)),
}
_ENCODER, _DECODER = (CASES["t5gemma2"][1][part] for part in ("encoder", "decoder"))
_T5 = _ENCODER["text_config"]
OTHERS |= {
    "t5gemma2_untied": ("t5gemma2", {"tie_word_embeddings": False, "decoder": _DECODER | {
        "sliding_window": 1, "final_logit_softcapping": None, "attention_bias": True, "num_key_value_heads": 4}}),
    # An odd window, its smallest value, and rotary frequencies of both kinds of layers.
    "t5gemma2_odd_window": ("t5gemma2", {"encoder": _ENCODER | {"text_config": _T5 | {
        "sliding_window": 5, "rms_norm_eps": 1e-3, "attention_bias": True, "query_pre_attn_scalar": 20, "head_dim": 8,
        "rope_parameters": {SLIDING: LINEAR | {"rope_theta": 70.0},
                            FULL: {"rope_type": "default", "rope_theta": 9e3}}}}}),
    "t5gemma2_smallest_window": ("t5gemma2", {"encoder": _ENCODER | {"text_config": _T5 | {"sliding_window": 1}}}),
    "t5gemma2_window_of_two": ("t5gemma2", {"encoder": _ENCODER | {"text_config": _T5 | {"sliding_window": 2}}}),
    "t5gemma2_by_class": ("t5gemma2", {
        "encoder": _ENCODER | {"text_config": {
            key: value for key, value in (_T5 | {"num_hidden_layers": 7}).items() if key not in (
                "layer_types", "rope_parameters", "query_pre_attn_scalar", "head_dim")}},
        "decoder": {key: value for key, value in (_DECODER | {"num_hidden_layers": 7}).items() if key not in (
            "layer_types", "rope_parameters", "query_pre_attn_scalar", "rms_norm_eps")}}),
}
QWEN = CASES["qwen3_5_multimodal"][1]["text_config"]
OTHERS |= {
    "apertus_long": ("apertus", {"rope_scaling": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16}}),
    # One file has the same heads in all layers, which transformers 5.24 notes as an object without overrides.
    "gemma4_proportional": ("gemma4", {"global_head_dim": 16, "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25}}}, (), SALTED),
    "gemma3_long": ("gemma3", {"rope_parameters": {
        FULL: {"rope_type": "longrope", "rope_theta": 1e5, "short_factor": SHORT + LONG[:4],
               "long_factor": LONG + SHORT[:4], "original_max_position_embeddings": 16},
        SLIDING: {"rope_type": "default", "rope_theta": 500.0}}}, (
            "rope_scaling", "rope_theta", "rope_local_base_freq")),
    "nemotron_h_layer_types": ("nemotron_h", {"layer_types": [
        "linear_attention", "mlp", FULL, "linear_attention", "mlp"]}, ("hybrid_override_pattern",)),
    "deepseek_v2_norm_passed_over": ("deepseek_v2", {"norm_topk_prob": True}),
    # Tables of equal numbers are tied, others are not.
    "qwen2_tied_beside_head": ("qwen2", {"tie_word_embeddings": True}, (), {"extra": {"lm_head.weight": (203, 64)}}),
    "t5_gated_relu": ("flan_t5", {"feed_forward_proj": "gated-relu"}, (), SHORT_TEXTS),
    "deberta_v2_untied": ("deberta_v2", {"tie_word_embeddings": False}, (), SHORT_TEXTS),
    "gemma3_multimodal_uncapped": ("gemma3_multimodal", {
        "text_config": CASES["gemma3_multimodal"][1]["text_config"] | {"final_logit_softcapping": 3.0}}),
    "mistral4_empty_scaling": ("mistral4", {"rope_scaling": {}}, ("rope_parameters",)),
    "olmo3_type_passed_over": ("olmo3", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "phimoe_always_two": ("phimoe", {"num_experts_per_tok": 4}, ("rope_theta",)),
    "roberta_untied": ("roberta", {"tie_word_embeddings": False}, (), {"lengths": (9, 17)}),
    "qwen3_5_two_ties": ("qwen3_5_multimodal", {"text_config": QWEN | {"tie_word_embeddings": True}}),
}


def _variant(base: str, changes: dict, dropped: tuple = (), options: dict | None = None) -> tuple[str, dict, dict]:
    kind, config, common = CASES[base]
    config = {key: value for key, value in (copy.deepcopy(config) | changes).items() if key not in dropped}
    return kind, config, {**common, "lengths": (9, 41), **(options or {})}


KINDS_OF_VARIANTS = LAYERS | ACTIVATIONS | ROTARY | LEFT_OUT | OTHERS | ONE_TAP | FEWER_AND_MORE | POSITIONS
VARIANTS = {name: _variant(*parts) for name, parts in KINDS_OF_VARIANTS.items()}
