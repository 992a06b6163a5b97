"""Configurations of recurrent families, with and without attention layers."""

from tests.specs.configs_decoder import GROUPED, RMS, family

RECURRENT: dict[str, tuple[str, dict, dict]] = {}


def case(name: str, *parts: dict, kind: str = "causal", **options) -> None:
    """Add a case whose config is the union of `parts`; the second prompt is longer than a chunk of the scan."""
    merged: dict = {}
    for part in parts:
        merged |= part
    RECURRENT[name] = kind, merged, {"lengths": (2, 37)} | options


DELTA = GROUPED | RMS | {
    "num_hidden_layers": 3, "hidden_size": 48, "head_dim": 24, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "attention_bias": False}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28}
case("qwen3_next", DELTA, QWEN_MOE, family("Qwen3Next", "qwen3_next"), {
    "full_attention_interval": 3, "partial_rotary_factor": 0.25, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "mlp_only_layers": [1], "rope_theta": 1e7})
case("qwen3_next_experts", RECURRENT["qwen3_next"][1], {"mlp_only_layers": [], "num_hidden_layers": 2,
                                                        "full_attention_interval": 2, "linear_value_head_dim": 12})
LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "attn_output_gate": True,
          "mamba_ssm_dtype": "float32", "rope_parameters": {
              "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
              "mrope_section": [1, 1, 1]}}
NEWER = {key: value for key, value in DELTA.items() if key != "rope_theta"} | LAYERS
case("qwen3_5", NEWER, family("Qwen3_5", "qwen3_5_text"), {"linear_key_head_dim": 16, "linear_value_head_dim": 20})
case("qwen3_5_moe", NEWER, QWEN_MOE, family("Qwen3_5Moe", "qwen3_5_moe_text"), {"linear_num_value_heads": 2})
SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
         "num_position_embeddings": 16, "deepstack_visual_indexes": []}
case("qwen3_5_multimodal", {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 200,
    "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 199, "tie_word_embeddings": False,
    "vision_config": SIGHT | {"model_type": "qwen3_5"}, "text_config": NEWER | {"model_type": "qwen3_5_text"}},
     kind="multimodal")
HASHED = NEWER | QWEN_MOE | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention",
                                            "linear_attention"],
    "hc_count": 3, "hc_lowrank": 10, "ple_layer_ids": [4, 2], "ple_embed_dim": 36, "ple_conv_kernel_size": 3,
    "ngram_size": 3, "heads_per_ngram": 3, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
    "seed": 99, "split_ngram_parts": 4, "eos_token_id": 188, "indexer_n_heads": 9, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 12, "indexer_compress_ratio": 4, "norm_topk_prob": True}
COUNTED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
case("qwen4_exp", HASHED, family("Qwen4Exp", "qwen4_exp_text"), kept=COUNTED)
case("qwen4_exp_multimodal", {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "image_token_id": 200,
    "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 199, "tie_word_embeddings": False,
    "vision_config": SIGHT | {"model_type": "qwen4_exp_vision"}, "text_config": {
        key: value for key, value in HASHED.items() if key not in ("layer_types", "ple_embed_dim")} | {
        "model_type": "qwen4_exp_text", "hc_count": 2, "hc_lowrank": 24, "ple_layer_ids": [1], "ngram_size": 4,
        "heads_per_ngram": 2, "split_ngram_parts": 1, "eos_token_id": [107, 2], "ple_conv_kernel_size": 4,
        "indexer_budget": 10, "indexer_compress_ratio": 5, "output_gate_type": "sigmoid", "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
                            "mrope_interleaved": True, "mrope_section": [2, 2, 2]}}}, kind="multimodal", kept=COUNTED)
case("qwen4_exp_plain", HASHED, family("Qwen4Exp", "qwen4_exp_text"), {
    "ple_layer_ids": None, "layer_types": None, "full_attention_interval": 2, "indexer_compress_ratio": 1,
    "indexer_budget": 7, "attention_bias": True, "linear_num_value_heads": 2, "eos_token_id": None})
case("olmo_hybrid", GROUPED, RMS, family("OlmoHybrid", "olmo_hybrid"), {
    "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_value_head_dim": 12, "rope_parameters": None, "attention_bias": False,
    "pad_token_id": 0})
del RECURRENT["olmo_hybrid"][1]["rope_theta"]

MAMBA2 = {"vocab_size": 203, "hidden_size": 48, "num_hidden_layers": 2, "expand": 2, "num_heads": 6, "head_dim": 16,
          "state_size": 20, "n_groups": 3, "conv_kernel": 4, "chunk_size": 8, "layer_norm_epsilon": 1e-5,
          "hidden_act": "silu", "use_bias": False, "use_conv_bias": True, "rms_norm": True,
          "tie_word_embeddings": False, "pad_token_id": 1}
case("mamba2", MAMBA2, family("Mamba2", "mamba2"))
case("mamba2_limited", MAMBA2, family("Mamba2", "mamba2"), {"time_step_limit": [0.3, 0.6], "use_bias": True})
case("mamba", family("Mamba", "mamba"), {
    "vocab_size": 203, "hidden_size": 40, "num_hidden_layers": 2, "expand": 2, "state_size": 12, "conv_kernel": 3,
    "pad_token_id": 0, "time_step_rank": 5, "layer_norm_epsilon": 1e-5, "hidden_act": "silu", "use_bias": False,
    "use_conv_bias": True})
MIXED = GROUPED | RMS | {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20,
                         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8, "mamba_conv_bias": True,
                         "mamba_proj_bias": False, "attention_bias": False, "hidden_size": 48}
GRANITE = MIXED | family("GraniteMoeHybrid", "granitemoehybrid") | {
    "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    "shared_intermediate_size": 36, "layer_types": ["mamba", "attention", "mamba"]}
case("granitemoehybrid", GRANITE, {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20,
                                   "position_embedding_type": "nope"})
case("granitemoehybrid_dense", GRANITE, {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_proj_bias": True,
                                         "position_embedding_type": "rope", "tie_word_embeddings": True})
case("bamba", MIXED, family("Bamba", "bamba"), {"attn_layer_indices": [2], "attn_rotary_emb": 6,
                                                   "time_step_limit": [0.4, 0.7]})
case("jamba", GROUPED, family("Jamba", "jamba"), {
    "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_dt_rank": 5, "mamba_conv_bias": True, "mamba_proj_bias": False, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "use_mamba_kernels": False})
NEMOTRON = GROUPED | family("NemotronH", "nemotron_h") | {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 20, "conv_kernel": 4, "chunk_size": 8,
    "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "head_dim": 16, "layer_norm_epsilon": 1e-5,
    "use_bias": False, "use_conv_bias": True, "time_step_min": 0.001, "attention_bias": False, "mlp_bias": False}
case("nemotron_h", NEMOTRON, {"hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5})
case("nemotron_h_moe", NEMOTRON, {
    "hybrid_override_pattern": "ME*M", "num_hidden_layers": 4, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5})
FALCON = MIXED | family("FalconH1", "falcon_h1") | {
    "num_hidden_layers": 2, "mamba_d_ssm": 96, "rope_theta": 1e11, "head_dim": 16, "embedding_multiplier": 5.0,
    "key_multiplier": 0.4, "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.9, 0.3], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.4, 0.3, 0.7, 0.5, 0.6], "mlp_bias": False, "projectors_bias": False}
case("falcon_h1", FALCON, {"mamba_rms_norm": False})
case("falcon_h1_normed", FALCON, {"mamba_rms_norm": True, "mamba_norm_before_gate": False})
case("minimax", GROUPED, RMS, family("MiniMax", "minimax"), {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 12, "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 24, "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.5,
    "full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.8},
     kept=("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
case("recurrent_gemma", family("RecurrentGemma", "recurrent_gemma"), {
    "vocab_size": 203, "hidden_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    "intermediate_size": 144, "lru_width": 48, "attention_window_size": 6, "conv1d_width": 4, "logits_soft_cap": 20.0,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "block_types": ["recurrent", "attention"], "pad_token_id": 0})
case("kimi_linear", GROUPED, family("KimiLinear", "kimi_linear"), {
    "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 4},
    "kv_lora_rank": 20, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "mla_use_nope": True, "first_k_dense_replace": 1, "num_experts": 6, "num_experts_per_token": 2,
    "num_shared_experts": 1, "moe_intermediate_size": 20, "moe_renormalize": True, "num_expert_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.4, "model_max_length": 64, "pad_token_id": 0,
    "moe_router_activation_func": "sigmoid"})
