"""Configurations of decoders whose layers share or repeat blocks: name -> (kind, config, options), as in
configs_decoder.py.
"""

from tests.specs.configs_decoder import noting

LOOPS: dict[str, tuple[str, dict, dict]] = {}
case = noting(LOOPS)

LONGCAT = {"vocab_size": 203, "hidden_size": 32, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "num_layers": 2,
           "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 12,
           "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 10, "n_routed_experts": 6, "zero_expert_num": 3,
           "moe_topk": 3, "zero_expert_type": "identity", "routed_scaling_factor": 2.5, "rope_theta": 5000.0,
           "max_position_embeddings": 64, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
case("longcat_flash", "LongcatFlashForCausalLM", "longcat_flash", LONGCAT, lengths=(9, 20))
case("longcat_flash_alone", "LongcatFlashForCausalLM", "longcat_flash", LONGCAT, {
    "num_layers": 1, "zero_expert_num": 0, "moe_topk": 2, "num_attention_heads": 2, "v_head_dim": 16})
case("longcat_flash_idle", "LongcatFlashForCausalLM", "longcat_flash", LONGCAT, {
    "num_layers": 3, "n_routed_experts": 2, "zero_expert_num": 9, "moe_topk": 5, "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0}}, lengths=(9, 30))

HRM = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
       "head_dim": 12, "max_position_embeddings": 64, "tie_word_embeddings": False}
case("hrm_text", "HrmTextForCausalLM", "hrm_text", HRM)
case("hrm_text_cycles", "HrmTextForCausalLM", "hrm_text", HRM, {
    "num_hidden_layers": 1, "H_cycles": 3, "L_cycles": 1, "embedding_scale": 2.0, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3}, lengths=(9, 20))
case("hrm_text_once", "HrmTextForCausalLM", "hrm_text", HRM, {
    "num_hidden_layers": 3, "H_cycles": 1, "L_cycles": 2, "num_attention_heads": 2,
    "prefix_lm": False, "hidden_act": "gelu"})

ZAYA = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4,
        "router_hidden_size": 12, "max_position_embeddings": 64}
case("zaya", "ZayaForCausalLM", "zaya", ZAYA)
case("zaya_local", "ZayaForCausalLM", "zaya", ZAYA, {
    "num_attention_heads": 8, "num_key_value_heads": 4, "cca_time0": 3, "cca_time1": 4, "lm_head_bias": True,
    "tie_word_embeddings": False, "sliding_window": 5, "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding"],
    "num_experts": 2, "rope_parameters": {
        "hybrid": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
        "hybrid_sliding": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}}},
     lengths=(9, 30))
case("zaya_single", "ZayaForCausalLM", "zaya", ZAYA, {
    "num_hidden_layers": 1, "num_attention_heads": 2, "cca_time0": 2, "cca_time1": 1, "num_experts": 1,
    "rms_norm_eps": 1e-3})

INKLING = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "d_rel": 6,
           "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1,
           "swa_head_dim": 12, "sliding_window_size": 5, "rel_extent": 7, "intermediate_size": 40,
           "moe_intermediate_size": 24, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2,
           "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
           "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
case("inkling_text", "InklingForCausalLM", "inkling_text", INKLING, lengths=(9, 30))
case("inkling_scaled", "InklingForCausalLM", "inkling_text", INKLING, {
    "log_scaling_n_floor": 8, "log_scaling_alpha": 0.7, "conv_kernel_size": 3, "rel_extent": 40, "n_shared_experts": 1,
    "logits_mup_width_multiplier": 2.0, "route_scale": 1.5, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
    "mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads": 4}, lengths=(9, 30))
case("inkling", "InklingForConditionalGeneration", "inkling_mm_model", {"text_config": {
    key: value for key, value in INKLING.items() if key not in ("layer_types", "mlp_layer_types")} | {
    "model_type": "inkling_text", "dense_intermediate_size": 40, "intermediate_size": 24, "dense_mlp_idx": 1,
    "num_hidden_layers": 6, "local_layer_ids": [0, 2, 3, 4]},
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8,
                      "model_type": "inkling_vision", "text_hidden_size": 32},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8, "model_type": "inkling_audio", "text_hidden_size": 32},
    "image_token_id": 200, "audio_token_id": 201, "image_bos_token_id": 202, "audio_bos_token_id": 202},
     kind="audible")
