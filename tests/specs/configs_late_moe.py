"""Configurations of families of late 2026, most with a mixture of experts: name -> (kind, config, options)."""

from tests.specs.configs_2026 import GROUPS, RMS, YARN, family

LATE_MOE: dict[str, tuple[str, dict, dict]] = {}
BARE = {key: value for key, value in RMS.items() if key not in ("rope_theta", "head_dim")}


def case(name: str, *parts: dict, kind: str = "causal", without: tuple[str, ...] = (), **options) -> None:
    """Add a case whose config is the union of `parts` without the keys `without`."""
    merged: dict = {}
    for part in parts:
        merged |= part
    LATE_MOE[name] = kind, {key: value for key, value in merged.items() if key not in without}, options


def wrapped(architecture: str, model_type: str, text: dict, **other) -> dict:
    """A configuration with the language model's configuration nested in it."""
    return {"architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False,
            "text_config": text} | other


case("hy_v3", RMS, family("HYV3", "hy_v3"), {
    "num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 2, "moe_intermediate_size": 20,
    "router_scaling_factor": 1.7, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
     without=("rope_theta",))
case("hy_v3_mixed", RMS, family("HYV3", "hy_v3"), {
    "num_experts": 4, "num_experts_per_tok": 3, "num_shared_experts": 1, "moe_intermediate_size": 24,
    "router_scaling_factor": 2.5, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    "mlp_layer_types": ["sparse", "dense", "sparse"]})

SARVAM = GROUPS | {"num_experts": 6, "num_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 64}
case("sarvam_moe", RMS, SARVAM, family("SarvamMoE", "sarvam_moe"), {"rope_theta": 8000000.0, "use_qk_norm": True})
case("sarvam_moe_biased", RMS, SARVAM, family("SarvamMoE", "sarvam_moe"), {
    "use_qkv_bias": True, "use_qk_norm": False, "n_group": 3, "topk_group": 2, "norm_topk_prob": False,
    "first_k_dense_replace": 0, "num_shared_experts": 2, "num_hidden_layers": 2})
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
          "v_head_dim": 14, "attention_bias": False}
case("sarvam_mla", RMS, SARVAM, LATENT, family("SarvamMLA", "sarvam_mla"), {
    "q_lora_rank": None, "q_head_dim": 20, "head_dim": 32, "rope_scaling": YARN | {
        "type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
     lengths=(9, 30))

case("sarvam_mla_compressed", RMS, SARVAM, LATENT, family("SarvamMLA", "sarvam_mla"), {
    "q_lora_rank": 28, "n_group": 3, "topk_group": 2, "rope_interleave": False, "num_hidden_layers": 2,
    "tie_word_embeddings": True}, without=("head_dim",))

MIMO = RMS | GROUPS | family("MiMoV2Flash", "mimo_v2_flash") | {
    "n_routed_experts": 6, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1, "routed_scaling_factor": None}
case("mimo_v2_flash", MIMO, {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 5,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_value_scale": 0.6, "attention_bias": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}},
     without=("rope_theta",))
# As published: windows and thetas by keys of their own.
case("mimo_v2_flash_published", MIMO, {
    "num_hidden_layers": 2, "sliding_window_size": 4, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1],
    "swa_num_key_value_heads": 2, "rope_theta": 5000000.0, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334,
    "attention_value_scale": None, "layernorm_epsilon": 1e-5}, without=("rms_norm_eps",))

KIMI = RMS | GROUPS | LATENT | {
    "model_type": "deepseek_v3", "q_lora_rank": 28, "n_routed_experts": 6, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_hidden_layers": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
case("kimi_k25", wrapped("Kimi_K25ForConditionalGeneration", "kimi_k25", {
    key: value for key, value in KIMI.items() if key != "head_dim"} | {"rope_scaling": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0}}, image_token_id=200, video_token_id=201, projection_hidden_size=16,
    vision_config=EYES | {"model_type": "kimi_k25_vision", "pos_emb_height": 4, "pos_emb_width": 4,
                          "pos_emb_time": 2}), kind="multimodal", lengths=(9, 30),
     renamed=("language_model.model.blocks.", "language_model.model.layers."))

case("kimi_k25_tied", wrapped("Kimi_K25ForConditionalGeneration", "kimi_k25", {
    key: value for key, value in KIMI.items() if key != "head_dim"} | {
        "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    image_token_id=200, video_token_id=201, projection_hidden_size=16,
    vision_config=EYES | {"model_type": "kimi_k25_vision", "pos_emb_height": 4, "pos_emb_width": 4,
                          "pos_emb_time": 2}) | {"tie_word_embeddings": True}, kind="multimodal",
     renamed=("language_model.model.blocks.", "language_model.model.layers."))

case("flex_olmo", BARE, family("FlexOlmo", "flex_olmo"), {
    "pad_token_id": 0, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "norm_topk_prob": False,
    "rope_theta": 500000.0, "attention_bias": False})
case("flex_olmo_normed", BARE, family("FlexOlmo", "flex_olmo"), {
    "pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 20, "norm_topk_prob": True,
    "num_hidden_layers": 2, "tie_word_embeddings": True, "rope_theta": 10000.0, "num_key_value_heads": 4})

ARIA = RMS | {"model_type": "aria_text", "intermediate_size": 20, "moe_num_experts": 5, "moe_topk": 2,
              "moe_num_shared_experts": 2, "rope_theta": 5000000.0, "num_hidden_layers": 2}
case("aria_text", ARIA, {"architectures": ["AriaTextForCausalLM"], "moe_num_shared_experts": 1, "moe_topk": 3,
                         "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"})
case("aria", wrapped("AriaForConditionalGeneration", "aria", ARIA, image_token_index=200,
                     projector_patch_to_query_dict={"4": 2}, vision_config=EYES | {
                         "model_type": "idefics3_vision", "image_size": 8}), kind="multimodal")

SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
         "num_position_embeddings": 16, "deepstack_visual_indexes": []}
QWEN = RMS | {"model_type": "qwen3_vl_moe_text", "num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
              "moe_intermediate_size": 20, "mlp_only_layers": [], "norm_topk_prob": True, "rope_scaling": {
                  "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}}
TOKENS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 199}
case("qwen3_vl_moe", wrapped("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", QWEN, **TOKENS,
                             vision_config=SIGHT | {"model_type": "qwen3_vl_moe"}), kind="multimodal",
     turned=(".experts.gate_up_proj", ".experts.down_proj"))
# Stacks as transformers writes them.
case("qwen3_vl_moe_mixed", wrapped("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", QWEN | {
    "mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False, "rope_theta": 5000000.0}, **TOKENS,
    vision_config=SIGHT | {"model_type": "qwen3_vl_moe"}), kind="multimodal")
GLM = RMS | GROUPS | {
    "model_type": "glm4v_moe_text", "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "attention_bias": True, "partial_rotary_factor": 0.5, "num_hidden_layers": 2,
    "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}}
WATCH = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
         "image_size": 16, "spatial_merge_size": 2}
MARKS = {"image_token_id": 200, "video_token_id": 201, "image_start_token_id": 202, "image_end_token_id": 199,
         "video_start_token_id": 198, "video_end_token_id": 197}
case("glm4v_moe", wrapped("Glm4vMoeForConditionalGeneration", "glm4v_moe", GLM, **MARKS,
                          vision_config=WATCH | {"model_type": "glm4v_moe_vision"}), kind="multimodal")
case("glm4v_moe_groups", wrapped("Glm4vMoeForConditionalGeneration", "glm4v_moe", GLM | {
    "n_group": 3, "topk_group": 2, "attention_bias": False, "first_k_dense_replace": 0, "n_shared_experts": 2,
    "norm_topk_prob": False}, **MARKS, vision_config=WATCH | {"model_type": "glm4v_moe_vision"}), kind="multimodal")

AXK1 = RMS | GROUPS | LATENT | family("AXK1", "axk1") | {
    "q_lora_rank": 28, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "num_hidden_layers": 2}
case("axk1", AXK1, {"first_k_dense_replace": 1, "moe_layer_freq": 1, "rope_scaling": YARN | {
    "mscale": 1.0, "mscale_all_dim": 1.0}}, without=("head_dim",), lengths=(9, 30))
case("axk1_all_sparse", AXK1, {"mlp_layer_types": ["sparse", "sparse"], "rope_interleave": False, "n_group": 1,
                               "topk_group": 1, "norm_topk_prob": False}, without=("head_dim",))

M3 = RMS | {"model_type": "minimax_m3_vl_text", "intermediate_size": 20, "dense_intermediate_size": 28,
            "shared_intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 1.5,
            "swiglu_alpha": 1.702, "routed_scaling_factor": 1.7, "rotary_dim": 8, "partial_rotary_factor": 0.5,
            "num_hidden_layers": 2}
case("minimax_m3", wrapped("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", M3 | {
    "moe_layer_freq": [0, 1], "max_position_embeddings": 64, "sparse_attention_config": {
        "sparse_attention_freq": [0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 8,
        "sparse_topk_blocks": 4, "sparse_local_block": 1}}, image_token_index=200, video_token_index=201,
    projector_hidden_size=16, vision_config=EYES | {
        "model_type": "minimax_m3_vl_vision", "image_size": 8, "spatial_merge_size": 2}),
     kind="multimodal", lengths=(9, 31))
# Blocks of keys that are not all selected: two of 4 keys.
case("minimax_m3_blocks", wrapped("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", M3 | {
    "num_hidden_layers": 4, "moe_layer_freq": [0, 1, 1, 0], "max_position_embeddings": 128, "swiglu_limit": 7.0,
    "intermediate_size": 28, "shared_intermediate_size": 28, "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_attention_freq": [0, 1, 1, 1], "sparse_num_index_heads": 2,
        "sparse_index_dim": 24, "sparse_block_size": 4, "sparse_topk_blocks": 2, "sparse_local_block": 1,
        "sparse_score_type": "max", "sparse_init_block": 0, "sparse_disable_index_value": [0, 1, 1, 1]}},
    image_token_index=200, video_token_index=201, projector_hidden_size=16, vision_config=EYES | {
        "model_type": "minimax_m3_vl_vision", "image_size": 8, "spatial_merge_size": 2}),
     kind="multimodal", lengths=(41, 70))
case("minimax_m3_full", wrapped("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", M3 | {
    "mlp_layer_types": ["sparse", "dense"], "tie_word_embeddings": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.5,
    "partial_rotary_factor": 1.0, "rotary_dim": 16}, image_token_index=200, video_token_index=201,
    projector_hidden_size=16, vision_config=EYES | {
        "model_type": "minimax_m3_vl_vision", "image_size": 8, "spatial_merge_size": 2}), kind="multimodal")

STEP = RMS | {
    "model_type": "step3p5", "num_attention_groups": 2, "moe_num_experts": 5, "moe_top_k": 2, "share_expert_dim": 24,
    "moe_intermediate_size": 20, "moe_router_scaling_factor": 1.7, "sliding_window": 5, "attention_other_setting": {
        "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "moe_layers_enum": "1,2",
    "swiglu_limits": [0.0, 0.4, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.5],
    "rope_theta": [5000000.0, 10000.0, 5000000.0], "partial_rotary_factors": [0.5, 1.0, 0.5], "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}
SEES = EYES | {"model_type": "step3p5_vision", "image_size": 16, "mlp_ratio": 1.5}
case("step3p7", wrapped("Step3p7ForConditionalGeneration", "step3p7", {
    key: value for key, value in STEP.items() if key != "num_key_value_heads"}, image_token_id=200,
    vision_config=SEES), kind="multimodal", lengths=(9, 30))
case("step3p7_plain", wrapped("Step3p7ForConditionalGeneration", "step3p7", {
    key: value for key, value in STEP.items() if key not in (
        "rope_scaling", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared", "attention_other_setting",
        "moe_layers_enum", "num_attention_groups")} | {
            "rope_theta": 10000.0, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    image_token_id=200, vision_config=SEES), kind="multimodal")

LING = family("BailingHybrid", "bailing_hybrid") | {
    "vocab_size": 203, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
    "intermediate_size": 40, "rms_norm_eps": 1e-6, "hidden_act": "silu", "model_max_length": 64, "num_experts": 6,
    "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 20, "moe_renormalize": True,
    "num_expert_group": 3, "topk_group": 2, "routed_scaling_factor": 2.4, "kv_lora_rank": 20, "q_lora_rank": None,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14, "head_dim": 12, "short_conv_kernel_size": 4,
    "layer_group_size": 3, "first_k_dense_replace": 1, "rope_theta": 600000.0, "pad_token_id": 0,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
case("bailing_hybrid", LING, {"kda_safe_gate": True, "kda_lower_bound": -3.0}, lengths=(2, 37))
case("bailing_hybrid_free", LING, {"kda_safe_gate": False, "q_lora_rank": 28, "layer_group_size": 2,
                                   "num_hidden_layers": 2, "num_expert_group": 1, "topk_group": 1}, lengths=(2, 37))

DOTS = RMS | GROUPS | family("Dots3Note", "dots3_note_text") | {
    "rope_theta": 80000000.0, "swa_rope_theta": 10000.0, "num_key_value_heads": 4, "kv_lora_rank": 24,
    "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14, "index_topk": 7,
    "index_head_dim": 12, "index_n_heads": 5, "n_routed_experts": 6, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 24, "swa_num_attention_heads": 3, "swa_num_key_value_heads": 3,
    "swa_q_lora_rank": 20, "swa_kv_lora_rank": 22, "swa_head_dim": 16, "swa_qk_nope_head_dim": 10,
    "swa_v_head_dim": 18, "sliding_window_size": 5, "head_dim": 20, "pad_token_id": 0}
case("dots3_note", DOTS, {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "first_k_dense_replace": 1},
     lengths=(9, 30))
case("dots3_note_full", DOTS, {
    "num_hidden_layers": 2, "use_dsa": False, "layer_types": ["sliding_attention", "full_attention"], "n_group": 3,
    "topk_group": 2, "moe_layer_freq": [1, 1], "first_k_dense_replace": 0})

HEARS = {"hidden_size": 16, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 24, "input_size": 16,
         "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16,
         "nemo_final_size": 16, "audio_token_id": 201, "bias_max_distance": 20, "max_seq_len": 10}
case("phi4_multimodal", RMS, family("Phi4Multimodal", "phi4_multimodal"), {
    "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "sliding_window": 20, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
    "vision_config": EYES | {"image_size": 8, "crop_size": 8, "image_token_id": 200, "feature_layer": -1},
    "audio_config": HEARS}, without=("head_dim",), lengths=(9, 30))

AXK2 = RMS | GROUPS | LATENT | family("AXK2", "axk2") | {
    "q_lora_rank": 28, "n_routed_experts": 6, "n_shared_experts": 1, "index_topk": 7, "index_head_dim": 12,
    "index_n_heads": 5, "gated_norm_rank": 6, "num_hidden_layers": 2}
case("axk2", AXK2, {"first_k_dense_replace": 1, "rope_theta": 1000000.0}, without=("head_dim", "n_group", "topk_group"),
     lengths=(9, 30))

ERNIE = RMS | {
    "model_type": "ernie4_5_vl_moe_text", "moe_intermediate_size": [20, 12], "moe_k": 2, "moe_num_experts": 4,
    "moe_num_shared_experts": 2, "use_bias": False, "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}}
case("ernie4_5_vl_moe", wrapped("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", {
    key: value for key, value in ERNIE.items() if key != "rope_theta"}, image_token_id=200, video_token_id=201,
    vision_config={"model_type": "ernie4_5_vl_moe_vision", "depth": 1, "hidden_size": 16, "num_heads": 2,
                   "intermediate_size": 24, "patch_size": 4, "spatial_merge_size": 2}), kind="multimodal")
case("ernie4_5_vl_moe_mixed", wrapped("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", {
    key: value for key, value in ERNIE.items() if key != "rope_theta"} | {
        "mlp_layer_types": ["sparse", "dense"], "use_bias": True, "tie_word_embeddings": True, "moe_k": 3},
    image_token_id=200, video_token_id=201, vision_config={
        "model_type": "ernie4_5_vl_moe_vision", "depth": 1, "hidden_size": 16, "num_heads": 2,
        "intermediate_size": 24, "patch_size": 4, "spatial_merge_size": 2}) | {"tie_word_embeddings": True},
     kind="multimodal")
# More heads, so that no two keys have the same score, of zeros alone.
case("axk2_yarn", AXK2, {
    "index_n_heads": 12,
    "mlp_layer_types": ["sparse", "dense"], "norm_topk_prob": False, "tie_word_embeddings": True,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
     without=("head_dim", "n_group", "topk_group"), lengths=(9, 30))
case("phi4_multimodal_plain", LATE_MOE["phi4_multimodal"][1], {
    "sliding_window": None, "partial_rotary_factor": 1.0, "tie_word_embeddings": True, "num_key_value_heads": 4},
     without=("rope_scaling", "original_max_position_embeddings"))

HY4 = RMS | GROUPS | LATENT | family("HYV4", "hy_v4") | {
    "q_lora_rank": 28, "n_routed_experts": 6, "n_shared_experts": 1, "index_topk": 7, "index_head_dim": 12,
    "index_n_heads": 12, "hc_mult": 3, "hc_magnitude": 1.5, "hc_eps": 1e-4, "swiglu_limit": 0.5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
case("hy_v4", HY4, {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]},
     without=("head_dim",), lengths=(9, 30))
case("hy_v4_two_streams", HY4, {
    "hc_mult": 2, "hc_magnitude": 2.0, "swiglu_limit": 10.0, "mlp_layer_types": ["sparse", "sparse"],
    "tie_word_embeddings": True, "index_topk": 64, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
     without=("head_dim",), lengths=(9, 30))
case("glm46v_moe", wrapped("Glm46VForConditionalGeneration", "glm46v", GLM | {"n_routed_experts": 5}, **MARKS,
                           vision_config=WATCH | {"model_type": "glm4v_vision"}), kind="multimodal")
