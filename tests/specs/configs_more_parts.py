"""Configurations of further multimodal models: name -> (kind, config, options), as in configs_late_parts.py."""

from tests.specs.configs_2026 import CASES_2026
from tests.specs.configs_late_dense import LATE_DENSE
from tests.specs.configs_late_moe import LATE_MOE
from tests.specs.configs_late_parts import EYES, IMAGES, QWEN3, TEXT
from tests.specs.configs_recurrent import RECURRENT

MORE_PARTS: dict[str, tuple[str, dict, dict]] = {}


def text_of(config: dict, model_type: str = "", **keys) -> dict:
    """A text_config from a case's configuration."""
    text = {key: value for key, value in config.items() if key != "architectures"} | keys
    return text | {"model_type": model_type or config["model_type"]}


def case(name: str, architecture: str, model_type: str, *parts: dict, kind: str = "multimodal", **options) -> None:
    merged: dict = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        merged |= part
    MORE_PARTS[name] = (kind, merged, options)


case("lfm3_vl", "Lfm3VlForConditionalGeneration", "lfm3_vl", IMAGES, {
    "text_config": text_of(LATE_DENSE["lfm3"][0], hidden_size=32, intermediate_size=40), "tie_word_embeddings": True,
    "projector_hidden_size": 16, "vision_config": EYES | {
        "model_type": "lfm3_vl_vision", "num_key_value_heads": 1, "spatial_merge_size": 2, "num_hidden_layers": 1}},
     lengths=(9, 20))
DOCLING = TEXT | {"model_type": "granite_docling_text", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                  "residual_multiplier": 0.7, "attention_multiplier": 0.2, "pad_token_id": 0}
DOCLING_EYES = {"vision_config": EYES | {"model_type": "granite_docling_vision", "out_hidden_size": 32,
                                         "scale_factor": 2, "deepstack_visual_indexes": [0]}, "image_token_id": 200}
case("granite_docling", "GraniteDoclingForConditionalGeneration", "granite_docling", DOCLING_EYES, {
    "text_config": DOCLING})
case("granite_docling_defaults", "GraniteDoclingForConditionalGeneration", "granite_docling", DOCLING_EYES, {
    "text_config": TEXT | {"model_type": "granite_docling_text", "attention_bias": True, "mlp_bias": True,
                           "pad_token_id": 0},
    "tie_word_embeddings": False})
case("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", "nemotron_h_omni", {
    "text_config": text_of(RECURRENT["nemotron_h"][1], hidden_size=32), "image_token_id": 200, "video_token_id": 201,
    "audio_token_id": 202, "vision_hidden_size": 16, "projector_hidden_size": 16, "audio_config": None,
    "vision_config": EYES | {"model_type": "radio", "video_temporal_patch_size": 2}})
case("hy_v4_vl", "HYV4VLForConditionalGeneration", "hy_v4_vl", {
    "text_config": text_of(LATE_MOE["hy_v4"][1], "hy_v4_vl_text", rms_norm_eps=1e-3, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}), "image_token_id": 200,
    "video_token_id": 201, "vision_config": EYES | {"model_type": "hy_v4_vl_vision", "out_hidden_size": 64,
                                                    "max_image_size": 28}}, lengths=(9, 30))
SPARSE = QWEN3 | {"model_type": "qwen3_omni_moe_text", "num_experts": 5, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 20, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2],
                                                                "interleaved": True}}
SENSES = {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
                            "out_hidden_size": 32, "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
                            "model_type": "qwen3_omni_moe_vision_encoder"},
          "audio_config": {"d_model": 16, "encoder_layers": 1, "num_mel_bins": 8, "encoder_attention_heads": 2,
                           "encoder_ffn_dim": 24, "max_source_positions": 10, "output_dim": 32,
                           "downsample_hidden_size": 8, "model_type": "qwen3_omni_moe_audio_encoder"},
          "image_token_id": 200, "video_token_id": 201, "audio_token_id": 202}
case("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", SENSES, {
    "text_config": SPARSE})
case("qwen3_omni_moe_thinker_some", "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", SENSES, {
    "text_config": SPARSE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False,
                             "attention_bias": True}})
M3 = {key: value for key, value in LATE_MOE["minimax_m3_full"][1]["text_config"].items() if key != "model_type"}
case("minimax_m3_text", "MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", M3, kind="causal")
case("minimax_m3_text_indexed", "MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", M3, {
    "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8, "index_topk_blocks": 4,
    "index_n_heads": 2, "index_head_dim": 8, "partial_rotary_factor": 0.5, "rotary_dim": 8}, kind="causal",
     lengths=(9, 31))
case("minimax_m3_text_blocks", "MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", M3, {
    "max_position_embeddings": 128, "num_hidden_layers": 3, "shared_intermediate_size": 28,
    "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 1, "index_n_heads": 1,
    "index_block_size": 5, "index_topk_blocks": 3, "index_local_blocks": 2, "index_head_dim": 16,
    "partial_rotary_factor": 0.5, "rotary_dim": 8}, kind="causal", lengths=(43, 66))
case("minimax_m3_text_no_local", "MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", M3, {
    "max_position_embeddings": 128, "layer_types": ["minimax_m3_sparse", "minimax_m3_sparse"],
    "num_key_value_heads": 4, "index_n_heads": 4,
    "index_block_size": 16, "index_topk_blocks": 2, "index_local_blocks": 0, "index_head_dim": 16}, kind="causal",
     lengths=(50, 75))
APERTUS = {key: value for key, value in CASES_2026["apertus"][0].items() if key not in ("architectures", "model_type")}
case("apertus1p5_text", "Apertus1p5TextForCausalLM", "apertus1p5_text", APERTUS, {"output_vocab_size": 150},
     kind="causal")
case("apertus1p5_text_whole", "Apertus1p5TextForCausalLM", "apertus1p5_text", {
    key: value for key, value in APERTUS.items() if key not in ("rope_scaling", "rope_theta")}, kind="causal")
COMPASS = TEXT | {"layer_norm_eps": 1e-5, "sliding_window": 5, "tie_word_embeddings": True, "logit_scale": 0.25,
                  "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                  "rope_parameters": {"full_attention": None, "sliding_attention": {
                      "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}}}
del COMPASS["rope_theta"], COMPASS["rms_norm_eps"]
case("cohere_compass_text", "CohereCompassForCausalLM", "cohere_compass_text", COMPASS, kind="causal")
BOTH = {"full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                           "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}}
case("cohere_compass", "CohereCompassForConditionalGeneration", "cohere_compass", IMAGES, {
    "text_config": COMPASS | {"model_type": "cohere_compass_text", "rope_parameters": BOTH},
    "vision_config": EYES | {"model_type": "cohere_compass_vision", "out_hidden_size": 32,
                             "deepstack_visual_indexes": [0], "num_position_embeddings": 4, "depth": 1}},
     lengths=(9, 30))
case("cohere_compass_classifier", "CohereCompassTextForSequenceClassification", "cohere_compass_text", COMPASS, {
    "pooling": "mean", "num_labels": 3, "attention_bias": True, "layer_types": None, "rope_parameters": {
        "full_attention": BOTH["sliding_attention"]}}, kind="classifier")
