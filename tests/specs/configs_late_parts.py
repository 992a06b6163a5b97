"""Multimodal models, of which the language model is run: name -> (config, options).

As in configs_decoder.py; kind is "multimodal", or "audible" for classes that transformers lists as audio models.
"""

from tests.specs.configs_recurrent import NEWER

PARTS: dict[str, tuple[dict, dict]] = {}


def case(name: str, architecture: str, text: dict | None, *parts: dict, **options) -> None:
    """Add a case: `text` is its text_config (None: its values are in `parts`), the rest the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": name}
    for part in parts:
        merged |= part
    if text is not None:
        merged["text_config"] = text
    PARTS[name] = (merged, {"kind": "multimodal"} | options)


TEXT = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0}
LLAMA = TEXT | {"model_type": "llama"}
QWEN2 = TEXT | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 12}
MISTRAL = TEXT | {"model_type": "mistral", "sliding_window": None}
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}
CLIP = {"vision_config": EYES | {"model_type": "clip_vision_model", "projection_dim": 16}}
SIGLIP = {"vision_config": EYES | {"model_type": "siglip_vision_model"}}
IMAGES = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 199}
GLM_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
            "image_size": 28, "patch_size": 14}
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}

# Eyes of Qwen2-VL and Qwen2.5-VL; their configurations are published flat, with what is about text beside the rest.
case("qwen2_vl", "Qwen2VLForConditionalGeneration", None, TEXT, IMAGES, {
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
                      "model_type": "qwen2_vl"},
    "rope_scaling": MROPE, "use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1,
    "tie_word_embeddings": True})
case("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", TEXT | {
    "model_type": "qwen2_5_vl_text", "rope_scaling": MROPE | {"rope_type": "default"}, "use_sliding_window": True,
    "sliding_window": 4, "max_window_layers": 1}, IMAGES, {
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                      "fullatt_block_indexes": [0], "model_type": "qwen2_5_vl"}, "tie_word_embeddings": False})
case("qwen3_vl", "Qwen3VLForConditionalGeneration", TEXT | {
    "model_type": "qwen3_vl_text", "head_dim": 12, "rope_scaling": {
        "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 2]}}, IMAGES, {
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                      "num_position_embeddings": 4, "deepstack_visual_indexes": [0], "model_type": "qwen3_vl"},
    "tie_word_embeddings": True})

case("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", TEXT | {
    "model_type": "qwen2_5_omni_text", "rope_scaling": MROPE | {"rope_type": "default"}, "use_sliding_window": False}, {
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                      "fullatt_block_indexes": [0], "model_type": "qwen2_5_omni_vision_encoder"},
    "audio_config": {"d_model": 16, "encoder_layers": 1, "num_mel_bins": 8, "encoder_attention_heads": 2,
                     "encoder_ffn_dim": 24, "max_source_positions": 10, "output_dim": 32,
                     "model_type": "qwen2_5_omni_audio_encoder"},
    "image_token_index": 200, "video_token_index": 201, "audio_token_index": 202})
case("glm4v", "Glm4vForConditionalGeneration", TEXT | {
    "model_type": "glm4v_text", "partial_rotary_factor": 0.5, "attention_bias": True,
    "rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}}, {
    "vision_config": GLM_EYES | {"model_type": "glm4v"}, "image_token_id": 200, "video_token_id": 201})
case("glm46v", "Glm46VForConditionalGeneration", TEXT | {
    "model_type": "glm4v_text", "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.75, "rope_theta": 10000.0}}, {
    "vision_config": GLM_EYES | {"model_type": "glm4v_vision"}, "image_token_id": 200, "video_token_id": 201})
del PARTS["glm46v"][0]["text_config"]["rope_theta"]
case("glm_ocr", "GlmOcrForConditionalGeneration", TEXT | {
    "model_type": "glm_ocr_text", "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}}, {
    "vision_config": GLM_EYES | {"model_type": "glm_ocr_vision"}, "image_token_id": 200, "video_token_id": 201})
del PARTS["glm_ocr"][0]["text_config"]["rope_theta"]
case("hunyuan_vl", "HunYuanVLForConditionalGeneration", None, TEXT, {
    "head_dim": 8, "vision_config": EYES | {"num_attention_heads": 2, "max_image_size": 28, "model_type": "hunyuan_vl",
                             "spatial_merge_size": 2, "text_hidden_size": 32, "out_hidden_size": 32},
    "rope_scaling": {"type": "xdrope", "alpha": 100.0, "factor": 1.0, "xdrope_section": [1, 1, 1, 1],
                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "image_token_id": 200, "tie_word_embeddings": True})
case("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", None, TEXT, IMAGES, {
    "head_dim": 12, "use_bias": False, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"},
    "vision_config": EYES | {"model_type": "paddleocr_vl"}})

# One specification for all whose text_config is that of a known model.
case("llava", "LlavaForConditionalGeneration", LLAMA, CLIP, {
    "image_token_index": 200, "vision_feature_layer": -1, "tie_word_embeddings": False})
case("llava_next", "LlavaNextForConditionalGeneration", MISTRAL, CLIP, {
    "image_token_index": 200, "image_grid_pinpoints": [[28, 56]], "vision_feature_layer": -1,
    "use_image_newline_parameter": True})
case("llava_next_video", "LlavaNextVideoForConditionalGeneration", LLAMA, CLIP, {
    "image_token_index": 200, "video_token_index": 201, "image_grid_pinpoints": [[28, 56]]})
case("llava_onevision", "LlavaOnevisionForConditionalGeneration", QWEN2 | {"tie_word_embeddings": True}, SIGLIP, {
    "image_token_index": 200, "video_token_index": 201, "image_grid_pinpoints": [[28, 56]]})
case("vipllava", "VipLlavaForConditionalGeneration", LLAMA, CLIP, {
    "image_token_index": 200, "vision_feature_layers": [-1, -1]})
case("video_llava", "VideoLlavaForConditionalGeneration", LLAMA, CLIP, {
    "image_token_index": 200, "video_token_index": 201})
case("internvl", "InternVLForConditionalGeneration", QWEN3, {
    "vision_config": EYES | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
    "image_token_id": 200})
case("smolvlm", "SmolVLMForConditionalGeneration", LLAMA, {
    "vision_config": EYES | {"model_type": "smolvlm_vision"}, "image_token_id": 200, "scale_factor": 2,
    "tie_word_embeddings": False, "vocab_size": 203})
case("idefics3", "Idefics3ForConditionalGeneration", LLAMA, {
    "vision_config": EYES | {"model_type": "idefics3_vision"}, "image_token_id": 200, "scale_factor": 2,
    "tie_word_embeddings": True})
case("idefics2", "Idefics2ForConditionalGeneration", MISTRAL, {
    "vision_config": EYES | {"model_type": "idefics2"}, "image_token_id": 200,
    "perceiver_config": {"hidden_size": 32, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
                         "resampler_head_dim": 8, "num_key_value_heads": 1, "model_type": "idefics2"}})
case("lfm2_vl", "Lfm2VlForConditionalGeneration", TEXT | {
    "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5, "conv_L_cache": 3, "rms_norm_eps": 1e-5}, {
    "vision_config": EYES | {"model_type": "siglip2_vision_model", "num_patches": 4}, "image_token_id": 200,
    "projector_hidden_size": 24, "downsample_factor": 2})
case("ovis2", "Ovis2ForConditionalGeneration", QWEN2, {
    "vision_config": EYES | {"model_type": "ovis2_vision", "vocab_size": 16, "hidden_stride": 2,
                             "num_visual_indicator_tokens": 5},
    "hidden_size": 32, "vocab_size": 203, "image_token_id": 200,
    "visual_indicator_token_ids": [198, 199, 200, 201, 202]})
case("got_ocr2", "GotOcr2ForConditionalGeneration", QWEN2 | {"tie_word_embeddings": True}, {
    "vision_config": {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "image_size": 32, "patch_size": 16, "global_attn_indexes": [0], "mlp_dim": 24, "window_size": 1},
    "image_token_index": 200})
case("lighton_ocr", "LightOnOcrForConditionalGeneration", QWEN3, {
    "vision_config": EYES | {"model_type": "pixtral", "head_dim": 8}, "image_token_id": 200,
    "spatial_merge_size": 2})
case("video_llama_3", "VideoLlama3ForConditionalGeneration", QWEN2, {
    "vision_config": EYES | {"model_type": "video_llama_3_vision"}, "image_token_id": 200, "video_token_id": 201})
case("qwen2_audio", "Qwen2AudioForConditionalGeneration", QWEN2, {
    "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 1, "num_mel_bins": 8,
                     "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "max_source_positions": 10},
    "audio_token_index": 200}, kind="audible")
case("voxtral", "VoxtralForConditionalGeneration", LLAMA | {"head_dim": 12}, {
    "audio_config": {"model_type": "voxtral_encoder", "hidden_size": 16, "num_hidden_layers": 1, "num_mel_bins": 8,
                     "num_attention_heads": 2, "intermediate_size": 24, "max_source_positions": 10},
    "audio_token_id": 200}, kind="audible")
case("granite4_vision", "Granite4VisionForConditionalGeneration", TEXT | {
    "model_type": "granite4_vision_text", "embedding_multiplier": 1.5, "residual_multiplier": 0.7,
    "attention_multiplier": 0.3, "logits_scaling": 2.0}, {
    "vision_config": EYES | {"model_type": "siglip_vision_model", "hidden_size": 64}, "image_token_index": 200,
    "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1, 1, 1, 1],
    "image_grid_pinpoints": [[28, 56]],
    "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 24, "num_hidden_layers": 1,
                       "cross_attention_frequency": 1, "max_position_embeddings": 16,
                       "use_qformer_text_input": False}})
case("exaone4_5", "Exaone4_5_ForConditionalGeneration", TEXT | {
    "model_type": "exaone4", "sliding_window": 4, "sliding_window_pattern": "LG",
    "layer_types": ["sliding_attention", "full_attention"]}, {
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                      "fullatt_block_indexes": [0], "num_key_value_heads": 2, "model_type": "exaone4_5_vision"},
    "image_token_id": 200, "video_token_id": 201})
case("deepseek_vl", "DeepseekVLForConditionalGeneration", LLAMA, SIGLIP, {
    "image_token_id": 200, "tie_word_embeddings": False})
case("qwen3_asr", "Qwen3ASRForConditionalGeneration", QWEN3 | {"tie_word_embeddings": True}, {
    "audio_config": {"model_type": "qwen3_asr_encoder", "d_model": 16, "encoder_layers": 1, "num_mel_bins": 8,
                     "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "max_source_positions": 10,
                     "output_dim": 32, "downsample_hidden_size": 8},
    "audio_token_id": 200, "tie_word_embeddings": True}, kind="audible")
case("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", NEWER | {"model_type": "qwen3_5_text"}, {
    "vision_config": EYES | {"model_type": "minicpmv4_6_vision", "insert_layer_id": 0}, "insert_layer_id": 0,
    "image_size": 28, "image_token_id": 200, "video_token_id": 201})
# Their eyes are those of another library; what sees does not matter here.
case("perception_lm", "PerceptionLMForConditionalGeneration", LLAMA | {"tie_word_embeddings": True}, {
    "vision_config": SIGLIP["vision_config"] | {"model_args": {"embed_dim": 16}}, "image_token_id": 200,
    "video_token_id": 201})
case("fast_vlm", "FastVlmForConditionalGeneration", QWEN2, SIGLIP, {"image_token_id": 200})
case("janus", "JanusForConditionalGeneration", LLAMA | {"tie_word_embeddings": False}, {
    "vision_config": {"model_type": "janus_vision_model", "hidden_size": 16, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 2,
                      "projection_dim": 32, "num_image_tokens": 4},
    "vq_config": {"model_type": "janus_vqgan", "num_embeddings": 8, "embed_dim": 4, "latent_channels": 4,
                  "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 32,
                  "image_token_embed_dim": 32, "num_hidden_layers": 1},
    "image_token_id": 200, "tie_word_embeddings": False})
case("minicpm_ocr", "MiniCPMOcrForConditionalGeneration", NEWER | {"model_type": "qwen3_5_text"}, {
    "vision_config": EYES | {"model_type": "minicpm_ocr_vision", "insert_layer_id": 0}, "insert_layer_id": 0,
    "image_size": 28, "image_token_id": 200, "video_token_id": 201})
