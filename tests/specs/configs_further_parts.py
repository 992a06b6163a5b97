"""Configurations of further multimodal models: name -> (kind, config, options)."""

from tests.specs.configs_late_parts import EYES, IMAGES, LLAMA, QWEN2, QWEN3, SIGLIP, TEXT
from tests.specs.configs_more_parts import text_of
from tests.specs.configs_recurrent import RECURRENT

FURTHER_PARTS: dict[str, tuple[str, dict, dict]] = {}


def case(name: str, architecture: str, model_type: str, text: dict, *parts: dict, kind: str = "multimodal",
         **options) -> None:
    """Add a case: `text` is its text_config, the rest the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    for part in parts:
        merged |= part
    FURTHER_PARTS[name] = (kind, merged, options)


EARS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_mel_bins": 8}
HEARD = {"audio_token_id": 200}
case("qianfan_ocr", "QianfanOCRForConditionalGeneration", "qianfan_ocr", QWEN3, {
    "image_token_id": 200, "vision_config": EYES | {"model_type": "qianfan_ocr_vision", "image_size": [28, 28],
                                                    "patch_size": [14, 14]}},
     renamed=("language_model.model.encoder.", "language_model.model."))
case("glmasr", "GlmAsrForConditionalGeneration", "glmasr", LLAMA, HEARD, {
    "audio_config": EARS | {"model_type": "glmasr_encoder", "max_position_embeddings": 10}}, kind="audible")
AFTER_WHISPER = {"audio_config": EARS | {"model_type": "audioflamingo3_encoder", "max_source_positions": 10}}
case("audioflamingo3", "AudioFlamingo3ForConditionalGeneration", "audioflamingo3", QWEN2, HEARD, AFTER_WHISPER,
     kind="musical")
case("musicflamingo", "MusicFlamingoForConditionalGeneration", "musicflamingo", QWEN2 | {"num_hidden_layers": 3},
     HEARD, AFTER_WHISPER, {"audio_bos_token_id": 201, "audio_eos_token_id": 202}, kind="musical")
WAVES = {"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 8, "num_filters": 4, "kernel_size": 3,
         "downsampling_ratios": [2], "depths": [1, 1]}
case("vibevoice_asr", "VibeVoiceAsrForConditionalGeneration", "vibevoice_asr", QWEN2, HEARD, {
    "audio_bos_token_id": 201, "audio_eos_token_id": 202, "semantic_tokenizer_encoder_config": WAVES,
    "acoustic_tokenizer_encoder_config": WAVES}, kind="audible")
case("moss_transcribe", "MossTranscribeDiarizeForConditionalGeneration", "moss_transcribe_diarize", QWEN3, HEARD, {
    "audio_config": EARS | {"model_type": "moss_transcribe_diarize_audio", "max_source_positions": 10},
    "tie_word_embeddings": True}, kind="audible")
case("fun_asr_nano", "FunAsrNanoForConditionalGeneration", "fun_asr_nano", QWEN3, HEARD, {
    "adaptor_config": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1,
                       "projector_hidden_size": 16},
    "audio_config": EARS | {"model_type": "fun_asr_nano_encoder", "num_timestamp_prediction_layers": 1,
                            "max_position_embeddings": 20}, "tie_word_embeddings": True}, kind="audible")
case("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration", "deepseek_vl_hybrid", LLAMA, SIGLIP, {
    "image_token_id": 200, "high_res_vision_config": {
        "model_type": "sam_vision_model", "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "window_size": 2, "global_attn_indexes": [0],
        "mlp_dim": 24}, "tie_word_embeddings": True})
case("hyperclovax_vision", "HyperCLOVAXVisionV2ForConditionalGeneration", "hyperclovax_vision_v2", TEXT | {
    "model_type": "hyperclovax", "embedding_multiplier": 1.5, "residual_multiplier": 0.7, "logits_scaling": 0.5,
    "attention_multiplier": 0.2}, {
    "image_token_id": 200, "video_token_id": 201, "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0], "model_type": "qwen2_5_vl_vision"}})
case("omniasr", "OmniASRForConditionalGeneration", "omniasr", LLAMA, HEARD, {
    "audio_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                     "conv_dim": [8], "conv_kernel": [2], "conv_stride": [2], "num_conv_pos_embeddings": 4,
                     "num_conv_pos_embedding_groups": 2, "model_type": "omniasr_audio"}}, kind="audible")

case("cosmos3_omni", "Cosmos3OmniForConditionalGeneration", "cosmos3_omni", TEXT | {
    "model_type": "qwen3_vl_text", "head_dim": 12, "rope_scaling": {
        "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 2]}}, IMAGES, {
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                      "num_position_embeddings": 4, "deepstack_visual_indexes": [0], "model_type": "qwen3_vl_vision"}})
case("minicpmv4_7", "MiniCPMV4_7ForConditionalGeneration", "minicpmv4_7", text_of(
    RECURRENT["qwen3_5_multimodal"][1]["text_config"], "qwen3_5_text"), {
    "image_token_id": 200, "video_token_id": 201, "insert_layer_id": 0, "vision_config": EYES | {
        "model_type": "minicpmv4_7_vision", "insert_layer_id": 0}})
EMU = TEXT | {"model_type": "emu3_text_model", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
              "attention_dropout": 0.0}
case("emu3", "Emu3ForConditionalGeneration", "emu3", EMU, {
    "vq_config": {"codebook_size": 8, "embed_dim": 4, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1,
                  "hidden_size": 32, "channel_multiplier": [1], "attn_resolutions": [1], "num_attention_heads": 1},
    "vocabulary_map": {"<image>": 200}})
PERSIMMON = {key: value for key, value in TEXT.items() if key not in ("rms_norm_eps", "num_key_value_heads")} | {
    "model_type": "persimmon", "hidden_act": "relu2", "qk_layernorm": True, "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5}
case("fuyu", "FuyuForCausalLM", "fuyu", PERSIMMON, {
    "image_token_id": 200, "patch_size": 4, "tie_word_embeddings": False})
