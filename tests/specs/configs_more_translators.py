"""Configurations of further encoder-decoders: name -> (kind, config, options), as in configs_other.py."""

from tests.specs.configs_other import T5

TRANSLATORS: dict[str, tuple[str, dict, dict]] = {}
SMALL = T5 | {"d_model": 32, "d_ff": 40, "num_layers": 4, "num_decoder_layers": 2, "d_kv": 12}


def case(name: str, architecture: str, model_type: str, *parts: dict, **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {"architectures": [architecture], "model_type": model_type, "is_encoder_decoder": True}
    for part in parts:
        merged |= part
    TRANSLATORS[name] = ("translate", merged, options)


SWITCH = "SwitchTransformersForConditionalGeneration", "switch_transformers"
case("switch", *SWITCH, SMALL, {"num_experts": 3, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1,
                                "expert_capacity": 64})
case("switch_all", *SWITCH, SMALL, {"num_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 2,
                                    "num_sparse_decoder_layers": 2, "router_bias": True, "dense_act_fn": "gelu_new",
                                    "expert_capacity": 20})
LONG = "LongT5ForConditionalGeneration", "longt5"
case("longt5", *LONG, SMALL, {"num_layers": 2, "local_radius": 4, "feed_forward_proj": "gated-gelu",
                              "encoder_attention_type": "local", "tie_word_embeddings": False},
     extra={"lm_head.weight": (203, 32)}, lengths=(9, 30))
case("longt5_tied", *LONG, SMALL, {"num_layers": 2, "local_radius": 2, "relative_attention_num_buckets": 8,
                                   "relative_attention_max_distance": 6}, lengths=(3, 20))
