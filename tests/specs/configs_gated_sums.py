"""Cases of models that weigh the residual stream and a block's output against each other: name -> (kind, config,
options), as in configs_decoder.py."""

from tests.specs.configs_decoder import noting

GATED: dict[str, tuple[str, dict, dict]] = {}
case = noting(GATED)

SPARK = {"model_type": "muse_spark_text", "vocab_size": 203, "hidden_size": 32, "intermediate_size": 40,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
         "max_position_embeddings": 64, "moe_intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2,
         "moe_hidden_size": 16, "sliding_window": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPARK_PARTS = {"image_token_id": 200, "video_token_id": 201, "audio_token_id": 202, "out_hidden_size": 32,
               "projector_hidden_size": 16, "vision_config": {
                   "model_type": "muse_spark_vision", "hidden_size": 16, "intermediate_size": 24,
                   "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4,
                   "pos_emb_width": 4},
               "audio_config": {"model_type": "muse_spark_audio", "patch_sizes": [2, 2], "hidden_sizes": [8, 16],
                                "depths": [1, 1], "num_hidden_layers": 2, "out_hidden_size": 32}}


def spark(name: str, changes: dict, **options) -> None:
    case(name, "MuseSparkForConditionalGeneration", "muse_spark", SPARK_PARTS, {"text_config": SPARK | changes},
         kind="multimodal", lengths=(9, 20), **options)


spark("muse_spark", {})
spark("muse_spark_named", {
    "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [10000.0, 0, 10000.0], "mlp_layer_types": ["sparse", "dense", "sparse"],
    "qk_scale_factor": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 4.0, "post_norm_eps": 1e-2,
    "rms_norm_eps": 1e-3, "routed_scaling_factor": 2.5, "residual_gate_temperature": 1.1, "attention_bias": True,
    "hidden_act": "gelu_pytorch_tanh", "num_experts_per_tok": 3, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 16}})

DORY = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "sliding_window": 5,
        "n_input_layers": 1, "n_output_layers": 1, "tie_word_embeddings": False, "initializer_range": 0.5}
case("dory", "DoryForCausalLM", "dory", DORY, lengths=(9, 20))
# Each feed-forward block is listed as a layer; the last loop is followed by no layer.
case("dory_pairs", "DoryForCausalLM", "dory", DORY, {
    "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "full_attention", "mlp", "sliding_attention",
                    "mlp"], "num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 6, "n_output_layers": 0,
    "n_recurrent_loops": 3, "initializer_range": 0.05, "ngpt_alpha_init": 0.3, "attention_bias": True,
    "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0,
                           "original_max_position_embeddings": 16}}}, lengths=(9, 20))

INK = {"vocab_size": 203, "unpadded_vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 4,
       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4,
       "swa_num_key_value_heads": 1, "swa_head_dim": 12, "sliding_window_size": 5, "d_rel": 6, "rel_extent": 7,
       "max_position_embeddings": 64, "moe_intermediate_size": 24, "n_routed_experts": 5, "num_experts_per_tok": 2,
       "pad_token_id": 0, "n_layers_per_attn_res_block": 2,
       "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]}
INK_NEAR = {"log_scaling_n_floor": 8, "log_scaling_alpha": 0.7, "qk_l2_clip_threshold": 2.0,
            "rel_l2_clip_threshold": 1.5, "mlp_gate_softcap": 0.7, "mlp_up_softcap": 0.9,
            "final_logit_softcapping": 4.0, "conv_kernel_size": 3, "route_scale": 1.5, "rel_extent": 40}
INK_EYES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
            "intermediate_size": 24, "posemb_grid_size": 4, "projection_hidden_dim": 16, "text_hidden_size": 32,
            "model_type": "inkling2_vision"}
case("inkling2_text", "Inkling2ForCausalLM", "inkling2_text", INK, lengths=(9, 30))
case("inkling2", "Inkling2ForConditionalGeneration", "inkling2", {
    "text_config": {key: value for key, value in INK.items() if key != "layer_types"} | INK_NEAR | {
        "model_type": "inkling2_text", "num_hidden_layers": 6, "unpadded_vocab_size": 201, "rms_norm_eps": 1e-3,
        "n_layers_per_attn_res_block": 4, "num_experts_per_tok": 3},
    "vision_config": INK_EYES, "image_token_id": 200}, kind="multimodal", lengths=(9, 30))
LOOP = INK | {"num_hidden_layers": 6, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2,
              "loop_gate_rank": 6, "layer_types": [*INK["layer_types"], "hybrid_sliding", "hybrid"]}
case("inkling2_loop_text", "Inkling2LoopForCausalLM", "inkling2_loop_text", LOOP, lengths=(9, 30))
case("inkling2_loop", "Inkling2LoopForConditionalGeneration", "inkling2_loop", {
    "text_config": {key: value for key, value in INK.items() if key != "layer_types"} | INK_NEAR | {
        "model_type": "inkling2_loop_text", "num_hidden_layers": 6, "unpadded_vocab_size": 201,
        "loop_config": {"core_start": 2, "core_end": 6, "num_passes": 2, "gate_rank": 5}},
    "vision_config": INK_EYES, "image_token_id": 200}, kind="multimodal", lengths=(9, 30))
