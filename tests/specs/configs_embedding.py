"""Configurations of models that embed texts and are the encoder of another family: name -> (kind, config, options)."""

from tests.specs.configs_decoder import GEMMA3
from tests.specs.configs_other import T5

EMBEDDING: dict[str, tuple[str, dict, dict]] = {
    "gemma_embedding": ("hidden", GEMMA3 | {
        "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "sliding_window": 8,
        "query_pre_attn_scalar": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"lengths": (9, 20)}),
    "t5_encoder": ("text", T5 | {"architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": False},
                   {"lengths": (9, 20)}),
    "t5_encoder_gated": ("text", T5 | {
        "architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": False,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {})}
