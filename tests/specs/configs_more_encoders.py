"""Configurations of further encoders: name -> (kind, config, options), as in configs_other.py."""

from tests.specs.configs_other import TINY

ENCODERS: dict[str, tuple[str, dict, dict]] = {}
SMALL = TINY | {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
LABELS = {"num_labels": 3}


def case(name: str, kind: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        merged |= part
    ENCODERS[name] = (kind, merged, options)


GTE = SMALL | {"type_vocab_size": 1, "pad_token_id": 1, "rope_parameters": {
    "rope_type": "default", "rope_theta": 20000.0}}
case("gte", "masked", "GteForMaskedLM", "gte", GTE)
case("gte_embedding", "hidden", "GteModel", "gte", GTE, {"type_vocab_size": 0, "rope_parameters": {
    "rope_type": "linear", "factor": 2.0, "rope_theta": 160000.0}})
case("gte_reranker", "classifier", "GteForSequenceClassification", "gte", GTE, {"num_labels": 1, "type_vocab_size": 2},
     types=True)
ESMC = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64, "hidden_act": "silu", "pad_token_id": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
case("esmc", "masked", "EsmcForMaskedLM", "esmc", ESMC)
case("esmc_classifier", "classifier", "EsmcForSequenceClassification", "esmc", ESMC, LABELS, {"attention_bias": True})

XLM = {"vocab_size": 203, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 48, "pad_token_id": 2,
       "n_langs": 1, "gelu_activation": True}
case("xlm", "masked", "XLMWithLMHeadModel", "xlm", XLM)
case("xlm_causal", "masked", "XLMWithLMHeadModel", "xlm", XLM, {
    "causal": True, "gelu_activation": False, "n_langs": 3, "tie_word_embeddings": False, "layer_norm_eps": 1e-6})
case("xlm_classifier", "classifier", "XLMForSequenceClassification", "xlm", XLM, LABELS, {"summary_type": "mean"})
case("flaubert", "masked", "FlaubertWithLMHeadModel", "flaubert", XLM, {"layerdrop": 0.1})
ROPED = SMALL | {"embedding_size": 24, "hidden_act": "gelu", "rotary_value": False}
TURNS = "embed_positions.weight"  # which a file has all the same
case("roformer", "masked", "RoFormerForMaskedLM", "roformer", ROPED, types=True, kept=(TURNS,))
case("roformer_classifier", "classifier", "RoFormerForSequenceClassification", "roformer", ROPED, LABELS, {
    "embedding_size": 32, "hidden_act": "relu"}, kept=(TURNS,))
OFFSET = SMALL | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 34, "layer_norm_eps": 1e-5}
case("data2vec_text", "masked", "Data2VecTextForMaskedLM", "data2vec-text", OFFSET)
case("data2vec_text_classifier", "classifier", "Data2VecTextForSequenceClassification", "data2vec-text", OFFSET, LABELS)
case("ibert", "masked", "IBertForMaskedLM", "ibert", OFFSET, {"quant_mode": False})
case("ibert_classifier", "classifier", "IBertForSequenceClassification", "ibert", OFFSET, LABELS)
BIRD = SMALL | {"hidden_act": "gelu_new", "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
case("big_bird", "masked", "BigBirdForMaskedLM", "big_bird", BIRD, {"rescale_embeddings": True}, types=True)
case("big_bird_classifier", "classifier", "BigBirdForSequenceClassification", "big_bird", BIRD, LABELS, {
    "attention_type": "original_full", "use_bias": False}, lengths=(9, 40))

ESM = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
       "max_position_embeddings": 40, "layer_norm_eps": 1e-5, "pad_token_id": 1, "mask_token_id": 32,
       "tie_word_embeddings": True}
ESM2 = ESM | {"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False}
case("esm2", "masked", "EsmForMaskedLM", "esm", ESM2, {"mask_token_id": 9}, lengths=(9, 20))
case("esm2_turns", "hidden", "EsmModel", "esm", ESM2, {"rope_theta": 5000.0})
case("esm1b", "masked", "EsmForMaskedLM", "esm", ESM, {
    "position_embedding_type": "absolute", "token_dropout": False, "emb_layer_norm_before": True})
case("esm_classifier", "classifier", "EsmForSequenceClassification", "esm", ESM2, LABELS, {
    "emb_layer_norm_before": True})
