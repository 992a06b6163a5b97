"""Configurations of multimodal models added last: name -> (kind, config, options), as in configs_late_parts.py."""

from tests.specs.configs_decoder import noting
from tests.specs.configs_further_parts import EARS
from tests.specs.configs_late_others import SMALL
from tests.specs.configs_late_parts import EYES, IMAGES, LLAMA, SIGLIP, TEXT
from tests.specs.configs_more_parts import text_of
from tests.specs.configs_other import TINY
from tests.specs.configs_recurrent import RECURRENT

LAST_PARTS: dict[str, tuple[str, dict, dict]] = {}
_note = noting(LAST_PARTS)


def case(name: str, architecture: str, model_type: str, text: dict, *parts: dict, kind: str = "multimodal",
         **options) -> None:
    """Add a case: `text` is its text_config, the rest the union of `parts`."""
    _note(name, architecture, model_type, {"text_config": text}, *parts, kind=kind, **options)


GEMMA = {key: value for key, value in TEXT.items() if key != "hidden_act"} | {"model_type": "gemma", "head_dim": 12}
PALI = {"image_token_index": 200, "projection_dim": 32, "hidden_size": 32, "tie_word_embeddings": True}
case("paligemma", "PaliGemmaForConditionalGeneration", "paligemma", GEMMA, SIGLIP, PALI)
case("paligemma2", "PaliGemmaForConditionalGeneration", "paligemma", GEMMA | {
    "model_type": "gemma2", "query_pre_attn_scalar": 20, "sliding_window": 5, "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0}, SIGLIP, PALI)

COHERE = {key: value for key, value in TEXT.items() if key != "rms_norm_eps"} | {
    "model_type": "cohere2", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 5, "head_dim": 8,
    "num_hidden_layers": 4}
case("aya_vision", "AyaVisionForConditionalGeneration", "aya_vision", COHERE, SIGLIP, {
    "image_token_index": 200, "downsample_factor": 2, "tie_word_embeddings": True})
case("cohere2_vision", "Cohere2VisionForConditionalGeneration", "cohere2_vision", COHERE, SIGLIP, {
    "image_token_id": 200, "downsample_factor": 2, "alignment_intermediate_size": 16, "tie_word_embeddings": True})
GRANITE = TEXT | {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                  "residual_multiplier": 0.7, "attention_multiplier": 0.2, "pad_token_id": 0}
HEARD = {"audio_token_id": 200, "projector_config": {
    "model_type": "blip_2_qformer", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "encoder_hidden_size": 16}, "window_size": 4, "downsample_rate": 2,
    "encoder_config": {"model_type": "granite_speech_encoder", "hidden_dim": 16, "num_layers": 1, "num_heads": 2,
                       "input_dim": 8, "dim_head": 8, "output_dim": 4, "conv_kernel_size": 3, "context_size": 4,
                       "max_pos_emb": 8}}
case("granite_speech", "GraniteSpeechForConditionalGeneration", "granite_speech", GRANITE, HEARD, {
    "tie_word_embeddings": True}, kind="audible")

case("cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", "cosmos3_edge", TEXT | {
    "model_type": "cosmos3_edge_text", "hidden_act": "relu2", "head_dim": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}, IMAGES, {
    "vision_config": EYES | {"model_type": "cosmos3_edge_vision", "num_patches": 4}, "tie_word_embeddings": False})

MOLMO = TEXT | {"model_type": "molmo2_text", "head_dim": 12, "additional_vocab_size": 203, "tie_word_embeddings": False}
MOLMO_EYES = {"image_patch_id": 200, "vision_config": EYES | {
    "model_type": "molmo2_vision", "num_hidden_layers": 2, "image_size": [28, 28], "head_dim": 8,
    "num_key_value_heads": 2}, "adapter_config": {
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24,
    "text_hidden_size": 32, "vision_feature_layer": [-1, -2]}}
case("molmo2", "Molmo2ForConditionalGeneration", "molmo2", MOLMO, MOLMO_EYES)
case("molmo2_behind", "Molmo2ForConditionalGeneration", "molmo2", MOLMO | {
    "qk_norm_type": "olmo", "norm_after": True, "attention_bias": True, "rope_scaling_layers": [1],
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, MOLMO_EYES)

OCR = TEXT | {"model_type": "deepseek_ocr2_text", "num_key_value_heads": 4, "num_hidden_layers": 3,
              "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
SAM = {"model_type": "deepseek_ocr2_sam_vision", "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1,
       "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [0],
       "mlp_dim": 24, "downsample_channels": [8, 16]}
OCR_EYES = {"image_token_id": 200, "vision_config": {
    "model_type": "deepseek_ocr2_vision", "sam_config": SAM, "encoder_config": EYES | {
        "model_type": "deepseek_ocr2_encoder", "num_key_value_heads": 2}}, "tie_word_embeddings": False}
case("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2", OCR | {
    "mlp_layer_types": ["dense", "sparse", "sparse"]}, OCR_EYES)
case("deepseek_ocr2_groups", "DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2", OCR | {
    "mlp_layer_types": ["sparse", "dense", "sparse"], "topk_method": "group_limited_greedy", "n_group": 3,
    "topk_group": 2, "routed_scaling_factor": 1.5}, OCR_EYES)

KOSMOS = {"vocab_size": 203, "max_position_embeddings": 64, "embed_dim": 32, "layers": 2, "ffn_dim": 40,
          "attention_heads": 4, "activation_function": "gelu", "pad_token_id": 1}
case("kosmos2", "Kosmos2ForConditionalGeneration", "kosmos-2", KOSMOS | {"model_type": "kosmos_2_text_model"}, {
    "vision_config": EYES | {"model_type": "kosmos_2_vision_model"}, "latent_query_num": 2}, part="text_model")
case("kosmos2_5", "Kosmos2_5ForConditionalGeneration", "kosmos-2.5", KOSMOS | {
    "model_type": "kosmos_2_5_text_model", "scale_embedding": False}, {
    "vision_config": EYES | {"model_type": "kosmos_2_5_vision_model", "head_dim": 8, "patch_embed_hidden_size": 16,
                             "max_num_patches": 8}, "latent_query_num": 2})

OPT = {"model_type": "opt", "vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
       "ffn_dim": 40, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": True}
QUERIES = {"vision_config": EYES, "qformer_config": {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31,
    "max_position_embeddings": 8, "encoder_hidden_size": 16}, "num_query_tokens": 2, "image_token_index": 200}
case("blip2", "Blip2ForConditionalGeneration", "blip-2", OPT, QUERIES, part="language_model")
case("instructblip", "InstructBlipForConditionalGeneration", "instructblip", LLAMA, QUERIES, part="language_model")
BART = {"model_type": "bart", "vocab_size": 203, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36,
        "max_position_embeddings": 48, "pad_token_id": 1, "activation_function": "gelu"}
case("florence2", "Florence2ForConditionalGeneration", "florence2", BART, {
    "image_token_id": 200, "is_encoder_decoder": True, "tie_word_embeddings": True, "vision_config": {
        "model_type": "florence_vision", "embed_dim": [8, 16], "num_heads": [1, 2], "num_groups": [1, 2],
        "depths": [1, 1], "patch_size": [3, 3], "patch_stride": [4, 2], "patch_padding": [1, 1],
        "patch_prenorm": [False, True], "window_size": 2, "projection_dim": 32}}, kind="describe")
MODERN = {key: value for key, value in TEXT.items() if key not in ("rope_theta", "rms_norm_eps", "hidden_act",
                                                                   "num_key_value_heads")} | {
    "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 8, "num_hidden_layers": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
case("modernvbert", "ModernVBertForMaskedLM", "modernvbert", MODERN | {"model_type": "modernbert"}, SIGLIP, {
    "image_token_id": 200, "pixel_shuffle_factor": 2, "tie_word_embeddings": False}, kind="masked")
case("ultravbert", "UltraVBertForMaskedLM", "ultravbert", {
    "model_type": "ultrabert", "vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 40, "prediction_head_size": 24, "sliding_window": 3,
    "pad_token_id": 0, "rms_norm_eps": 1e-6}, SIGLIP, {
    "image_token_id": 200, "pixel_shuffle_factor": 2, "tie_word_embeddings": True}, kind="masked")
HYBRID = text_of(RECURRENT["nemotron_h"][1], hidden_size=32)
LISTENS = EARS | {"max_position_embeddings": 32}
case("nemotron_transcribe", "Nemotron3_5TranscribeForConditionalGeneration", "nemo_speechlm", HYBRID, {
    "audio_token_id": 200, "audio_config": {"asr_config": LISTENS, "diarization_config": {
        "model_type": "nemotron3_diarization", "audio_config": LISTENS, "head_config": {
            "hidden_size": 8, "audio_hidden_size": 16}}}, "word_timestamp_config": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 9, "blank_token_id": 8}}, kind="audible")
_note("git", "GitForCausalLM", "git", TINY, SMALL, {"vision_config": EYES | {"model_type": "git_vision_model"}})
MUSE = {key: value for key, value in TEXT.items() if key != "hidden_act"} | {
    "model_type": "muse_glimmer_text", "head_dim": 12, "num_hidden_layers": 6, "sliding_window": 5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2}
MUSE_EYES = {"image_token_id": 200, "out_hidden_size": 32, "projector_hidden_size": 16, "vision_config": EYES | {
    "model_type": "muse_glimmer_vision"}, "tie_word_embeddings": False}
case("muse_glimmer", "MuseGlimmerForConditionalGeneration", "muse_glimmer", MUSE, MUSE_EYES, lengths=(9, 20))
case("muse_glimmer_named", "MuseGlimmerForConditionalGeneration", "muse_glimmer", MUSE | {
    "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [10000.0, 0, 10000.0], "qk_scale_factor": 2.0, "output_multiplier": 0.5,
    "final_logit_softcapping": 4.0, "post_norm_eps": 1e-2}, MUSE_EYES)
CODES = {"model_type": "chameleon_vqgan", "embed_dim": 4, "num_embeddings": 8, "latent_channels": 32,
         "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "resolution": 8}
CHAMELEON = TEXT | {"vq_config": CODES, "vocabulary_map": {"<image>": 200}, "tie_word_embeddings": False}
_note("chameleon", "ChameleonForConditionalGeneration", "chameleon", CHAMELEON, kind="multimodal")
_note("chameleon_swin", "ChameleonForConditionalGeneration", "chameleon", CHAMELEON, {"swin_norm": True},
      kind="multimodal")
LARGE4 = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    "model_type": "mistral_large4_text", "num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 24,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.5, "index_topk": 7, "index_head_dim": 12, "index_n_heads": 12,
    "no_rope_layers": [1, 0, 1, 0], "bos_token_id": 1, "eos_token_id": 2}
LARGE4_EYES = {"image_token_index": 200, "tie_word_embeddings": False, "vision_config": {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 8}}
case("mistral_large4", "MistralLarge4ForConditionalGeneration", "mistral_large4", LARGE4 | {
    "kv_source_layers": [0, 1, 0, 1], "indexer_types": ["full", "full", "shared", "full"],
    "final_logit_softcapping": 4.0}, LARGE4_EYES, lengths=(9, 30))
case("mistral_large4_plain", "MistralLarge4ForConditionalGeneration", "mistral_large4", LARGE4 | {
    "no_rope_layers": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "n_group": 4,
    "topk_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, LARGE4_EYES, lengths=(9, 30))
GLM5 = {key: value for key, value in TEXT.items() if key not in ("head_dim", "rope_theta")} | {
    "model_type": "glm5_next_text", "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 20,
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 0, "v_head_dim": 14, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.5, "index_topk": 12, "index_kpool": 4, "index_head_dim": 12, "index_n_heads": 12,
    "linear_head_dim": 12, "linear_num_heads": 3, "hc_mult": 3, "swiglu_limit": 0.5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2}
GLM5_EYES = {"image_token_id": 200, "video_token_id": 201, "tie_word_embeddings": False, "vision_config": {
    "model_type": "glm5_next_vision", "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24,
    "image_size": 28, "patch_size": 14, "out_hidden_size": 32, "projection_intermediate_size": 24,
    "spatial_merge_size": 2, "temporal_patch_size": 1}}
case("glm5_next", "Glm5NextForConditionalGeneration", "glm5_next", GLM5, GLM5_EYES, lengths=(9, 30))
case("glm5_next_shared", "Glm5NextForConditionalGeneration", "glm5_next", GLM5 | {
    "layer_types": ["indexed_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "indexer_types": ["full", "shared", "full", "full"],
    "linear_lower_bound": None, "index_kpool": 3, "index_topk": 6, "hc_sinkhorn_iters": 3, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": False}, GLM5_EYES, lengths=(9, 30))
