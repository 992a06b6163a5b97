"""Configurations of further decoders: name -> (kind, config, options), as in configs_decoder.py."""

from tests.specs.configs_decoder import noting
from tests.specs.configs_late_parts import EYES, TEXT
from tests.specs.configs_other import MODERN

DECODERS: dict[str, tuple[str, dict, dict]] = {}
case = noting(DECODERS)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
CROSSED = TEXT | {"model_type": "mllama_text_model", "num_hidden_layers": 4, "cross_attention_layers": [1, 3],
                  "rope_scaling": LLAMA3, "tie_word_embeddings": False, "pad_token_id": 0}
LOOKING = {"image_token_index": 203, "vision_config": EYES | {
    "model_type": "mllama_vision_model", "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32,
    "intermediate_layers_indices": [0], "max_num_tiles": 4, "supported_aspect_ratios": [[1, 1], [1, 2]]}}
case("mllama", "MllamaForConditionalGeneration", "mllama", LOOKING, {"text_config": CROSSED}, kind="multimodal",
     lengths=(9, 30))
case("mllama_first", "MllamaForConditionalGeneration", "mllama", LOOKING, {"text_config": CROSSED | {
    "cross_attention_layers": [0], "rope_scaling": None, "num_key_value_heads": 4}}, kind="multimodal")

LOCAL = MODERN | {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4}
case("modernbert_decoder", "ModernBertDecoderForCausalLM", "modernbert-decoder", LOCAL, lengths=(9, 20))
case("modernbert_decoder_classifier", "ModernBertDecoderForSequenceClassification", "modernbert-decoder", LOCAL, {
    "num_labels": 3, "layer_types": ["full_attention", "sliding_attention"] * 2, "norm_bias": True, "mlp_bias": True,
    "attention_bias": True, "classifier_bias": True, "local_attention": 12}, kind="classifier", lengths=(9, 20))

SMALL = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0,
         "max_position_embeddings": 48}
case("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "gpt_neox_japanese", SMALL, {
    "intermediate_multiple_size": 3, "hidden_act": "gelu", "rotary_pct": 1.0, "rotary_emb_base": 10000,
    "layer_norm_eps": 1e-5})
case("gpt_neox_japanese_partial", "GPTNeoXJapaneseForCausalLM", "gpt_neox_japanese", SMALL, {
    "intermediate_multiple_size": 2, "rotary_pct": 0.5, "rotary_emb_base": 5000, "tie_word_embeddings": False})
OLD = {"vocab_size": 203, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
case("openai_gpt", "OpenAIGPTLMHeadModel", "openai-gpt", OLD, {"afn": "gelu", "n_ctx": 48, "layer_norm_epsilon": 1e-5})
case("openai_gpt_swish", "OpenAIGPTLMHeadModel", "openai-gpt", OLD, {"afn": "swish", "tie_word_embeddings": False})
case("ctrl", "CTRLLMHeadModel", "ctrl", OLD, {"dff": 40, "layer_norm_epsilon": 1e-6})
DBRX = {"vocab_size": 203, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 5000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"},
                       "moe_normalize_expert_weights": 1.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "tie_word_embeddings": False}
case("dbrx", "DbrxForCausalLM", "dbrx", DBRX)
case("dbrx_plain", "DbrxForCausalLM", "dbrx", DBRX, {
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 4, "rope_theta": 5000.0}, "ffn_config": {
        "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 3, "moe_normalize_expert_weights": None,
        "ffn_act_fn": {"name": "gelu"}}})

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
FLINT = TEXT | {"num_hidden_layers": 5, "head_dim": 12, "sliding_window": 5, "num_experts": 5, "num_experts_per_tok": 2,
                "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "pad_token_id": 0}
case("flint", "FlintForCausalLM", "flint", FLINT, lengths=(9, 20))
case("flint_named", "FlintForCausalLM", "flint", FLINT, {
    "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "mlp_only_layers": [], "decoder_sparse_step": 2,
    "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True, "rope_scaling": LLAMA3},
     lengths=(9, 20))
LARA = {key: value for key, value in FLINT.items() if key != "intermediate_size"} | {
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3}
case("lara_mini", "LaraMiniForCausalLM", "lara_mini", LARA, lengths=(9, 20))
case("lara_mini_named", "LaraMiniForCausalLM", "lara_mini", LARA, {
    "num_hidden_layers": 3, "layer_types": [FULL, LINEAR, SLIDING], "norm_topk_prob": False, "attention_bias": True,
    "tie_word_embeddings": False}, lengths=(9, 20))
