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
