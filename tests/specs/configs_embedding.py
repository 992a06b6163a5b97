"""Configurations of text embedding models that are another family's encoder: name -> (kind, config, options)."""

from tests.specs.configs_decoder import GEMMA3
from tests.specs.configs_other import T5, TINY

JINA = TINY | {"model_type": "jina_embeddings_v3", "layer_norm_eps": 1e-5, "pad_token_id": 1, "rope_parameters": {
    "rope_type": "default", "rope_theta": 20000.0}}

EMBEDDING: dict[str, tuple[str, dict, dict]] = {
    "gemma_embedding": ("hidden", GEMMA3 | {
        "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "sliding_window": 8,
        "query_pre_attn_scalar": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"lengths": (9, 20)}),
    "gemma_embedding_one_in_six": ("hidden", GEMMA3 | {
        "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "sliding_window": 8,
        "num_hidden_layers": 7, "hidden_size": 32}, {"lengths": (9, 20)}),
    "t5_encoder": ("text", T5 | {"architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": False},
                   {"lengths": (9, 20)}),
    "t5_encoder_gated": ("text", T5 | {
        "architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": False,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {"lengths": (9, 20)}),
    "jina_embeddings_v3": ("masked", JINA | {"architectures": ["JinaEmbeddingsV3ForMaskedLM"]}, {"lengths": (9, 20)}),
    "jina_embeddings_v3_model": ("hidden", JINA | {"architectures": ["JinaEmbeddingsV3Model"], "type_vocab_size": 1},
                                 {})}
