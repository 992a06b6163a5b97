"""Configurations of encoders and encoder-decoders."""

ENCODERS: dict[str, tuple[str, dict, dict]] = {}
TRANSLATORS: dict[str, tuple[dict, dict]] = {}

TINY = {"vocab_size": 203, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 88,
        "max_position_embeddings": 48, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
        "type_vocab_size": 2}


def encoder(name: str, kind: str, architecture: str, model_type: str, config: dict, **options) -> None:
    ENCODERS[name] = (kind, config | {"architectures": [architecture], "model_type": model_type}, options)


def translator(name: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    merged: dict = {"architectures": [architecture], "model_type": model_type, "is_encoder_decoder": True}
    for part in parts:
        merged |= part
    TRANSLATORS[name] = (merged, options)


encoder("bert", "masked", "BertForMaskedLM", "bert", TINY, types=True)
encoder("minilm", "hidden", "BertModel", "bert", TINY | {"hidden_size": 48})
ROBERTA = TINY | {"layer_norm_eps": 1e-5, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 34}
encoder("roberta", "masked", "RobertaForMaskedLM", "roberta", ROBERTA)
encoder("xlm_roberta", "masked", "XLMRobertaForMaskedLM", "xlm-roberta", ROBERTA)
encoder("multilingual_e5", "hidden", "XLMRobertaModel", "xlm-roberta", ROBERTA)
encoder("distilbert", "masked", "DistilBertForMaskedLM", "distilbert", {
    "vocab_size": 203, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 88, "max_position_embeddings": 48,
    "activation": "gelu",
    "pad_token_id": 0, "sinusoidal_pos_embds": False, "tie_weights_": True})
encoder("mpnet", "masked", "MPNetForMaskedLM", "mpnet", ROBERTA | {"relative_attention_num_buckets": 32}, lengths=(9,
                                                                                                                   30))
encoder("electra", "hidden", "ElectraForPreTraining", "electra", TINY | {"embedding_size": 40}, types=True)
encoder("electra_generator", "masked", "ElectraForMaskedLM", "electra", TINY | {"embedding_size": 40}, types=True)
encoder("albert", "masked", "AlbertForMaskedLM", "albert", TINY | {
    "embedding_size": 40, "hidden_act": "gelu_new", "inner_group_num": 1, "num_hidden_groups": 1}, types=True)

T5 = {"vocab_size": 203, "d_model": 64, "d_kv": 24, "d_ff": 88, "num_layers": 3, "num_decoder_layers": 2,
      "num_heads": 4,
      "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6, "decoder_start_token_id": 0, "pad_token_id": 0,
      "eos_token_id": 1}
T5_NAME = ("T5ForConditionalGeneration", "t5")
translator("t5", *T5_NAME, T5, {"n_positions": 512})
translator("flan_t5", *T5_NAME, T5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                                     "relative_attention_max_distance": 20}, extra={"lm_head.weight": (203, 64)})
translator("mt5", "MT5ForConditionalGeneration", "mt5", T5, {
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, extra={"lm_head.weight": (203, 64)})
BART = {"vocab_size": 203, "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 88, "decoder_ffn_dim": 72, "max_position_embeddings": 48,
        "activation_function": "gelu", "scale_embedding": False, "pad_token_id": 1, "decoder_start_token_id": 2,
        "num_hidden_layers": 3}
translator("bart", "BartForConditionalGeneration", "bart", BART, {
    "normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False, "forced_bos_token_id": 0})
translator("mbart", "MBartForConditionalGeneration", "mbart", BART, {
    "normalize_before": True, "normalize_embedding": True, "add_final_layer_norm": True, "scale_embedding": True})
MARIAN = BART | {"activation_function": "swish", "scale_embedding": True, "static_position_embeddings": True,
                 "normalize_before": False, "normalize_embedding": False, "pad_token_id": 202,
                 "decoder_start_token_id": 202}
translator("marian", "MarianMTModel", "marian", MARIAN, {"decoder_vocab_size": 203,
                                                         "share_encoder_decoder_embeddings": True})
translator("pegasus", "PegasusForConditionalGeneration", "pegasus", BART, {
    "activation_function": "relu", "scale_embedding": True, "normalize_before": True, "add_final_layer_norm": True,
    "static_position_embeddings": True, "normalize_embedding": False, "pad_token_id": 0, "decoder_start_token_id": 0})
translator("blenderbot", "BlenderbotForConditionalGeneration", "blenderbot", BART, {
    "normalize_before": True, "add_final_layer_norm": True, "scale_embedding": True, "pad_token_id": 0,
    "decoder_start_token_id": 1})
translator("m2m100", "M2M100ForConditionalGeneration", "m2m_100", BART, {
    "activation_function": "relu", "scale_embedding": True, "encoder_layerdrop": 0.05})
translator("nllb", "M2M100ForConditionalGeneration", "m2m_100", BART, {
    "activation_function": "relu", "scale_embedding": True, "max_length": 200, "tokenizer_class": "NllbTokenizer"})
MODERN = {"vocab_size": 203, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 5,
          "num_attention_heads": 4,
          "hidden_activation": "gelu", "max_position_embeddings": 64, "norm_eps": 1e-5, "norm_bias": False,
          "pad_token_id": 0,
          "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "attention_bias": False, "local_attention": 8,
          "global_attn_every_n_layers": 3, "embedding_dropout": 0.0, "mlp_bias": False, "decoder_bias": True,
          "classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean", "cls_token_id": 1,
          "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
encoder("modernbert", "masked", "ModernBertForMaskedLM", "modernbert", MODERN)
encoder("modernbert_embedding", "hidden", "ModernBertModel", "modernbert", MODERN)
