"""Configurations of encoders, encoder-decoders and small decoders of later years, as in configs_other.py."""

from tests.specs.configs_other import BART, ROBERTA, T5, TINY

ENCODERS: dict[str, tuple[str, dict, dict]] = {}
TRANSLATORS: dict[str, tuple[dict, dict]] = {}
DECODERS: dict[str, tuple[dict, dict]] = {}
SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}


def encoder(name: str, kind: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    merged: dict = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        merged |= part
    ENCODERS[name] = (kind, merged, options)


def translator(name: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    merged: dict = {"architectures": [architecture], "model_type": model_type, "is_encoder_decoder": True}
    for part in parts:
        merged |= part
    TRANSLATORS[name] = (merged, options)


encoder("nomic_bert", "hidden", "NomicBertModel", "nomic_bert", TINY, SMALL, {
    "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}, types=True)
encoder("nomic_bert_masked", "masked", "NomicBertForMaskedLM", "nomic_bert", TINY, SMALL, {
    "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}})
EURO = TINY | SMALL | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 250000.0, "num_key_value_heads": 2,
                       "tie_word_embeddings": False}
encoder("eurobert", "masked", "EuroBertForMaskedLM", "eurobert", EURO)
encoder("eurobert_hidden", "hidden", "EuroBertModel", "eurobert", EURO, {"num_key_value_heads": 4})
encoder("roberta_prelayernorm", "masked", "RobertaPreLayerNormForMaskedLM", "roberta-prelayernorm", ROBERTA, SMALL)
encoder("xlm_roberta_xl", "masked", "XLMRobertaXLForMaskedLM", "xlm-roberta-xl", ROBERTA, SMALL)
encoder("megatron_bert", "masked", "MegatronBertForMaskedLM", "megatron-bert", TINY, SMALL, types=True)
encoder("rembert", "masked", "RemBertForMaskedLM", "rembert", TINY, SMALL, {
    "input_embedding_size": 24, "output_embedding_size": 48}, types=True)

FAR = TINY | SMALL | {
    "layer_norm_eps": 1e-7, "type_vocab_size": 0, "relative_attention": True, "max_relative_positions": -1,
    "position_biased_input": False, "pos_att_type": "p2c|c2p", "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_buckets": 8, "pooler_hidden_act": "gelu"}
encoder("deberta_v2", "masked", "DebertaV2ForMaskedLM", "deberta-v2", FAR, lengths=(9, 46))
# Distances beyond the last one, matrices of their own, and all that older files have.
encoder("deberta_v2_exact", "masked", "DebertaV2ForMaskedLM", "deberta-v2", FAR, {
    "legacy": False, "share_att_key": False, "norm_rel_ebd": "none", "position_buckets": -1,
    "max_relative_positions": 12, "position_biased_input": True, "type_vocab_size": 2, "pos_att_type": ["c2p", "p2c"]},
    types=True, lengths=(9, 46))
encoder("deberta_v2_narrow", "masked", "DebertaV2ForMaskedLM", "deberta-v2", FAR, {
    "embedding_size": 24, "pos_att_type": ["c2p"], "share_att_key": False, "max_relative_positions": 20})
encoder("deberta_v2_plain", "hidden", "DebertaV2Model", "deberta-v2", FAR, {
    "relative_attention": False, "position_biased_input": True, "norm_rel_ebd": "none", "pos_att_type": "p2c"})
encoder("deberta_v2_classifier", "classifier", "DebertaV2ForSequenceClassification", "deberta-v2", FAR, {
    "num_labels": 3, "max_relative_positions": 16}, lengths=(9, 46))

translator("umt5", "UMT5ForConditionalGeneration", "umt5", T5, {"feed_forward_proj": "gated-gelu"})
LITTLE = BART | {"d_model": 32, "encoder_layers": 2, "num_hidden_layers": 2}
translator("plbart", "PLBartForConditionalGeneration", "plbart", LITTLE, {"scale_embedding": True})
translator("mvp", "MvpForConditionalGeneration", "mvp", LITTLE, {"use_prompt": False, "forced_bos_token_id": 0})
translator("blenderbot_small", "BlenderbotSmallForConditionalGeneration", "blenderbot-small", LITTLE, {
    "scale_embedding": True, "pad_token_id": 0, "decoder_start_token_id": 1})
GEMMA = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 12,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
         "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 10, "sliding_window": 4,
         "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, "rope_theta": 10000.0, "pad_token_id": 0,
         "model_type": "t5_gemma_module"}
translator("t5gemma", "T5GemmaForConditionalGeneration", "t5gemma", {
    "encoder": GEMMA | {"num_hidden_layers": 3, "num_key_value_heads": 1, "intermediate_size": 36, "sliding_window": 3},
    "decoder": GEMMA, "vocab_size": 203, "tie_word_embeddings": True, "pad_token_id": 0}, lengths=(9, 20))

DECODERS["biogpt"] = ({"architectures": ["BioGptForCausalLM"], "model_type": "biogpt"} | TINY | SMALL | {
    "scale_embedding": True, "pad_token_id": 1}, {})
