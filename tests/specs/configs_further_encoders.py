"""Configurations of further encoders: name -> (kind, config, options), as in configs_other.py."""

from tests.specs.configs_late_others import FAR as LATE_FAR
from tests.specs.configs_other import ROBERTA, T5, TINY

FURTHER_ENCODERS: dict[str, tuple[str, dict, dict]] = {}


def case(name: str, kind: str, architecture: str, model_type: str, config: dict, **options) -> None:
    FURTHER_ENCODERS[name] = (kind, config | {"architectures": [architecture], "model_type": model_type}, options)


FAR = TINY | {"layer_norm_eps": 1e-7, "relative_attention": True, "position_biased_input": False,
              "pos_att_type": ["c2p", "p2c"], "max_relative_positions": -1, "type_vocab_size": 0, "legacy": True}
case("deberta", "masked", "DebertaForMaskedLM", "deberta", FAR, extra={"cls.predictions.bias": (203,)})
case("deberta_new_head", "masked", "DebertaForMaskedLM", "deberta", FAR | {
    "max_relative_positions": 5, "type_vocab_size": 2, "position_biased_input": True, "legacy": False,
    "pos_att_type": "p2c|c2p"}, types=True, lengths=(4, 30))
case("deberta_keys", "hidden", "DebertaModel", "deberta", FAR | {"pos_att_type": ["c2p"], "max_relative_positions": 12},
     lengths=(9, 40))
case("deberta_plain", "hidden", "DebertaModel", "deberta", FAR | {
    "relative_attention": False, "position_biased_input": True, "hidden_size": 48, "pos_att_type": []})
case("deberta_classifier", "classifier", "DebertaForSequenceClassification", "deberta", FAR | {
    "num_labels": 3, "pooler_hidden_size": 64, "pooler_hidden_act": "gelu"})
LUKE = ROBERTA | {"entity_vocab_size": 21, "entity_emb_size": 24, "type_vocab_size": 1}
case("luke", "masked", "LukeForMaskedLM", "luke", LUKE)
case("luke_plain", "hidden", "LukeModel", "luke", LUKE | {"use_entity_aware_attention": False})
LONG = ROBERTA | {
    "layer_norm_eps": 1e-12, "attention_window": [8, 4, 8], "sep_token_id": 2, "max_position_embeddings": 70}
case("longformer", "masked", "LongformerForMaskedLM", "longformer", LONG, lengths=(9, 41))
case("longformer_hidden", "hidden", "LongformerModel", "longformer", LONG | {"attention_window": [4, 16, 8]},
     lengths=(5, 50))
T5_ALONE = {key: value for key, value in T5.items() if key not in ("num_decoder_layers", "decoder_start_token_id")}
case("mt5_encoder", "text", "MT5EncoderModel", "mt5", T5_ALONE | {
    "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "tie_word_embeddings": False})
case("umt5_encoder", "text", "UMT5EncoderModel", "umt5", T5_ALONE | {
    "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "tie_word_embeddings": False})
CLIP = {key: TINY[key] for key in ("vocab_size", "num_hidden_layers", "num_attention_heads")} | {
    "hidden_size": 32, "intermediate_size": 40, "max_position_embeddings": 40, "projection_dim": 24, "bos_token_id": 3,
    "eos_token_id": 4, "layer_norm_eps": 1e-5}
case("clip_text", "text", "CLIPTextModel", "clip_text_model", CLIP | {"hidden_act": "quick_gelu"}, lengths=(9, 30))
case("clip_text_gelu", "text", "CLIPTextModel", "clip_text_model", CLIP | {
    "hidden_act": "gelu", "layer_norm_eps": 1e-3})
case("bert_generation", "hidden", "BertGenerationEncoder", "bert-generation", TINY)
XMOD = ROBERTA | {"languages": ["en_XX", "de_DE"], "default_language": "de_DE", "adapter_reduction_factor": 4}
case("xmod", "masked", "XmodForMaskedLM", "xmod", XMOD)
case("xmod_first", "hidden", "XmodModel", "xmod", XMOD | {
    "pre_norm": True, "ln_before_adapter": False, "default_language": "en_XX", "hidden_act": "relu"})
case("xmod_own_norm", "hidden", "XmodModel", "xmod", XMOD | {
    "adapter_layer_norm": True, "adapter_reduction_factor": 2, "type_vocab_size": 2})
ULTRA = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0,
         "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "prediction_head_size": 24,
         "sliding_window": 3, "tie_word_embeddings": False}
case("ultrabert", "masked", "UltrabertForMaskedLM", "ultrabert", ULTRA, lengths=(9, 40))
case("ultrabert_named", "masked", "UltrabertForMaskedLM", "ultrabert", ULTRA | {
    "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 6, "num_key_value_heads": 2,
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}}, lengths=(9, 40))
CONVOLVED = LATE_FAR | {"conv_kernel_size": 3, "conv_act": "gelu"}
case("deberta_v2_convolved", "masked", "DebertaV2ForMaskedLM", "deberta-v2", CONVOLVED, lengths=(2, 46))
case("deberta_v2_convolved_groups", "hidden", "DebertaV2Model", "deberta-v2", CONVOLVED | {
    "conv_groups": 2, "conv_kernel_size": 5, "conv_act": "tanh"}, lengths=(4, 30))
