"""Configurations of further encoders: name -> (kind, config, options), as in configs_other.py."""

from tests.specs.configs_other import TINY

ENCODERS: dict[str, tuple[str, dict, dict]] = {}
SMALL = TINY | {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
LABELS = {"num_labels": 3}


def case(name: str, kind: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    """Note a case whose config is the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        merged |= part
    ENCODERS[name] = (kind, merged, options)


GTE = SMALL | {"type_vocab_size": 1, "pad_token_id": 1, "rope_parameters": {
    "rope_type": "default", "rope_theta": 20000.0}}
case("gte", "masked", "GteForMaskedLM", "gte", GTE)
case("gte_embedding", "hidden", "GteModel", "gte", GTE, {"type_vocab_size": 0, "rope_parameters": {
    "rope_type": "linear", "factor": 2.0, "rope_theta": 160000.0}})
case("gte_reranker", "scores", "GteForSequenceClassification", "gte", GTE, {"num_labels": 1, "type_vocab_size": 2},
     types=True)
ESMC = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64, "hidden_act": "silu", "pad_token_id": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
case("esmc", "masked", "EsmcForMaskedLM", "esmc", ESMC)
case("esmc_classifier", "scores", "EsmcForSequenceClassification", "esmc", ESMC, LABELS, {"attention_bias": True})
