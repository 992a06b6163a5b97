"""Configurations of further encoder-decoders: name -> (kind, config, options), as in configs_other.py."""

from tests.specs.configs_other import BART

FURTHER_TRANSLATORS: dict[str, tuple[str, dict, dict]] = {}


def case(name: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": model_type, "is_encoder_decoder": True}
    for part in parts:
        merged |= part
    FURTHER_TRANSLATORS[name] = ("translate", merged, options)


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
