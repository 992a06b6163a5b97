"""Configurations of further encoder-decoders: name -> (kind, config, options), as in configs_other.py."""

from tests.specs.configs_late_parts import SIGLIP
from tests.specs.configs_other import BART

FURTHER_TRANSLATORS: dict[str, tuple[str, dict, dict]] = {}


def case(name: str, architecture: str, model_type: str, *parts: dict, kind: str = "translate", **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": model_type, "is_encoder_decoder": True}
    for part in parts:
        merged |= part
    FURTHER_TRANSLATORS[name] = (kind, merged, options)


SMALL = BART | {"d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36}
SEAMLESS = {key: value for key, value in SMALL.items() if key not in ("d_model", "num_hidden_layers")} | {
    "hidden_size": 32, "pad_token_id": 0, "scale_embedding": True, "activation_function": "relu"}
case("seamless_m4t", "SeamlessM4TForTextToText", "seamless_m4t", SEAMLESS)
case("seamless_m4t_v2", "SeamlessM4Tv2ForTextToText", "seamless_m4t_v2", SEAMLESS, {
    "activation_function": "gelu", "pad_token_id": 1, "scale_embedding": False, "encoder_layers": 2})
PEGASUS = SMALL | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "pad_token_id": 0,
                   "activation_function": "gelu_new", "scale_embedding": True, "num_hidden_layers": 3}
case("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", "bigbird_pegasus", PEGASUS, lengths=(9, 28))
case("bigbird_pegasus_full", "BigBirdPegasusForConditionalGeneration", "bigbird_pegasus", PEGASUS, {
    "attention_type": "original_full", "use_bias": True, "activation_function": "relu", "scale_embedding": False},
     lengths=(9, 40))
LED = SMALL | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32,
               "attention_window": [4, 8, 16]}
case("led", "LEDForConditionalGeneration", "led", LED, lengths=(9, 41))
case("led_near", "LEDForConditionalGeneration", "led", LED, {
    "encoder_layers": 2, "num_hidden_layers": 2, "attention_window": [4, 4], "activation_function": "relu"},
     lengths=(5, 60))
FSMT = SMALL | {"langs": ["en", "de"], "src_vocab_size": 203, "tgt_vocab_size": 203, "scale_embedding": True,
                "activation_function": "relu", "max_position_embeddings": 64, "use_cache": False}
case("fsmt", "FSMTForConditionalGeneration", "fsmt", FSMT, {"src_vocab_size": 190, "tie_word_embeddings": False},
     kept=("embed_positions.weight",))
case("fsmt_tied", "FSMTForConditionalGeneration", "fsmt", FSMT, {
    "tie_word_embeddings": True, "scale_embedding": False, "encoder_layers": 2, "num_hidden_layers": 2},
     kept=("embed_positions.weight",))
NLLB = BART | {"activation_function": "relu", "scale_embedding": True, "num_experts": 5, "encoder_sparse_step": 2,
               "decoder_sparse_step": 2, "moe_token_dropout": 0.2, "tie_word_embeddings": True}
case("nllb_moe", "NllbMoeForConditionalGeneration", "nllb-moe", NLLB)
case("nllb_moe_biased", "NllbMoeForConditionalGeneration", "nllb-moe", NLLB, {
    "router_bias": True, "normalize_router_prob_before_dropping": True, "batch_prioritized_routing": True,
    "moe_token_dropout": 0.0, "encoder_sparse_step": 1, "decoder_sparse_step": 3, "decoder_layers": 3, "num_experts": 3,
    "scale_embedding": False, "tie_word_embeddings": False, "activation_function": "gelu"})
GEMMA2 = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 12,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
          "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 60, "sliding_window": 4, "pad_token_id": 0,
          "final_logit_softcapping": 6.0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
          "rope_parameters": {
              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
              "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}}
SEEN = SIGLIP | {"mm_tokens_per_image": 4, "image_token_index": 200, "boi_token_index": 201, "eoi_token_index": 202}
case("t5gemma2", "T5Gemma2ForConditionalGeneration", "t5gemma2", {
    "encoder": SEEN | {"model_type": "t5gemma2_encoder", "text_config": GEMMA2 | {
        "model_type": "t5gemma2_text", "num_hidden_layers": 4, "num_key_value_heads": 1, "intermediate_size": 36,
        "sliding_window": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                                             "sliding_attention"]}},
    "decoder": GEMMA2 | {"model_type": "t5gemma2_decoder"}, "vocab_size": 203, "image_token_index": 200,
    "eoi_token_index": 202, "tie_word_embeddings": True, "pad_token_id": 0}, kind="describe", lengths=(9, 20))
