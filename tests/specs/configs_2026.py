"""Configurations of families of 2025 and 2026: name -> (config, options), as in configs_decoder.py."""

CASES_2026: dict[str, tuple[dict, dict]] = {}


def case(name: str, *parts: dict, **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {}
    for part in parts:
        merged |= part
    CASES_2026[name] = (merged, options)


def family(name: str, model_type: str) -> dict:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type}


COMMON = {"vocab_size": 203, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 88, "max_position_embeddings": 64,
          "tie_word_embeddings": False, "head_dim": 16}
RMS = COMMON | {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
GROUPS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
          "num_experts_per_tok": 2, "moe_intermediate_size": 20}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

case("jais2", COMMON, family("Jais2", "jais2"), {
    "layer_norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 10000.0, "attention_bias": True, "mlp_bias": True})
case("vaultgemma", RMS, family("VaultGemma", "vaultgemma"), {
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
    "query_pre_attn_scalar": 24, "sliding_window": 5, "tie_word_embeddings": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"]})
case("exaone_moe", RMS, GROUPS, family("ExaoneMoe", "exaone_moe"), {
    "num_experts": 6, "num_shared_experts": 2, "n_group": 3, "topk_group": 2, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1})
case("solar_open", RMS, GROUPS, family("SolarOpen", "solar_open"), {
    "n_routed_experts": 6, "n_shared_experts": 1, "partial_rotary_factor": 1.0, "rope_scaling": YARN,
    "first_k_dense_replace": 0}, lengths=(9, 30))
case("minimax_m2", RMS, family("MiniMaxM2", "minimax_m2"), {
    "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 3, "rotary_dim": 8, "use_qk_norm": True,
    "scoring_func": "sigmoid", "use_routing_bias": True})
case("hunyuan_v1_moe", RMS, family("HunYuanMoEV1", "hunyuan_v1_moe"), {
    "intermediate_size": 24, "num_experts": 4, "moe_topk": [1, 2, 3], "num_shared_expert": [1, 1, 1],
    "moe_intermediate_size": [24, 24, 24], "use_qk_norm": True, "attention_bias": False,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}})
case("ernie4_5_moe", RMS, family("Ernie4_5_Moe", "ernie4_5_moe"), {
    "moe_intermediate_size": 20, "moe_k": 2, "moe_num_experts": 6, "moe_num_shared_experts": 1, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": 1, "use_bias": False, "tie_word_embeddings": True})
case("afmoe", RMS, GROUPS, family("Afmoe", "afmoe"), {
    "num_experts": 6, "num_shared_experts": 1, "num_dense_layers": 1, "global_attn_every_n_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5,
    "route_scale": 2.448, "route_norm": True, "mup_enabled": True, "score_func": "sigmoid"})
case("cwm", RMS, family("Cwm", "cwm"), {
    "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16}}, lengths=(9, 40))
case("ministral3", RMS, family("Ministral3", "ministral3"), {"sliding_window": None, "rope_parameters": {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.2}},
    lengths=(9, 30))
del CASES_2026["ministral3"][0]["rope_theta"]
case("glm4_moe_lite", RMS, GROUPS, family("Glm4MoeLite", "glm4_moe_lite"), {
    "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "kv_lora_rank": 24, "q_lora_rank": 28, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_scaling": None, "attention_bias": False})
del CASES_2026["glm4_moe_lite"][0]["head_dim"]

V32 = RMS | GROUPS | {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "index_n_heads": 5,
    "index_head_dim": 12, "index_topk": 7, "attention_bias": False, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc"}
del V32["head_dim"]
case("deepseek_v32", V32, family("DeepseekV32", "deepseek_v32"), {
    "n_group": 4, "topk_group": 2, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, lengths=(9, 30))
case("glm_moe_dsa", V32, family("GlmMoeDsa", "glm_moe_dsa"), {
    "rms_norm_eps": 1e-5, "indexer_types": ["full", "shared", "full"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, lengths=(9, 30))
del CASES_2026["glm_moe_dsa"][0]["rope_theta"]

case("nanochat", RMS, family("NanoChat", "nanochat"), {"hidden_act": "relu2", "final_logit_softcapping": 5.0,
                                                       "num_key_value_heads": 4, "attention_bias": False})
case("apertus", RMS, family("Apertus", "apertus"), {
    "hidden_act": "xielu", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}})
del CASES_2026["apertus"][0]["head_dim"]
case("bitnet", RMS, family("BitNet", "bitnet"), {"hidden_act": "relu2", "tie_word_embeddings": True})
del CASES_2026["bitnet"][0]["head_dim"]
case("phimoe", RMS, family("Phimoe", "phimoe"), {
    "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.2,
    "input_jitter_noise": 0.0, "attention_bias": True, "lm_head_bias": True, "sliding_window": None,
    "rope_scaling": None})
del CASES_2026["phimoe"][0]["head_dim"]

LLAMA4 = RMS | {"model_type": "llama4_text", "intermediate_size": 24, "intermediate_size_mlp": 56,
                "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
                "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1, 1], "num_hidden_layers": 4, "floor_scale": 5,
                "attn_scale": 0.2, "attn_temperature_tuning": True, "use_qk_norm": True, "rope_scaling": None,
                "attention_bias": False}
case("llama4", LLAMA4, {"architectures": ["Llama4ForCausalLM"]}, lengths=(9, 25))
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}
case("llama4_multimodal", {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "image_token_index": 200,
    "boi_token_index": 201, "eoi_token_index": 202,
    "vision_config": EYES | {"model_type": "llama4_vision_model", "vision_output_dim": 16, "projector_input_dim": 16,
                             "projector_output_dim": 16, "num_channels": 3},
    "text_config": LLAMA4 | {"num_local_experts": 3, "use_qk_norm": False, "interleave_moe_layer_step": 1}},
    kind="multimodal", lengths=(9, 25))

TURNS = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
GEMMA4 = COMMON | {
    "model_type": "gemma4_text", "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32, "num_key_value_heads": 2, "num_global_key_value_heads": None, "rope_parameters": TURNS,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 203, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True, "intermediate_size": 40}
case("gemma4", GEMMA4, {"architectures": ["Gemma4ForCausalLM"]}, lengths=(9, 17))
case("gemma4_moe", GEMMA4, {
    "architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
    "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16})
GEMMA3N = COMMON | {
    "model_type": "gemma3n_text", "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 190, "num_kv_shared_layers": 2, "laurel_rank": 6,
    "altup_num_inputs": 3, "altup_active_idx": 1, "altup_coef_clip": 120.0, "altup_correct_scale": True,
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0], "intermediate_size": [40, 40, 40, 40],
    "final_logit_softcapping": 8.0, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True}
case("gemma3n", GEMMA3N, {"architectures": ["Gemma3nForCausalLM"]})
