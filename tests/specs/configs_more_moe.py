"""Configurations of further mixtures of experts: name -> (kind, config, options), as in configs_decoder.py."""

MORE_MOE: dict[str, tuple[str, dict, dict]] = {}

# Rates, windows and widths that go into neither one another nor a block of keys. Many heads of an index, so that no two
# entries have the same score, of zeros alone. Tables of experts are of whole numbers, which a rule gives.
V4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 203, "hidden_size": 48,
      "moe_intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 20,
      "num_key_value_heads": 1, "num_experts_per_tok": 2, "n_routed_experts": 6, "n_shared_experts": 1,
      "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 1.0,
      "max_position_embeddings": 256, "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "num_hash_layers": 1,
      "hc_mult": 3, "hc_sinkhorn_iters": 5, "hc_eps": 1e-4, "sliding_window": 6, "o_groups": 2, "o_lora_rank": 12,
      "index_n_heads": 12, "index_head_dim": 12, "index_topk": 3, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-6,
      "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
      "num_nextn_predict_layers": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def case(name: str, *parts: dict, **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {}
    for part in parts:
        merged |= part
    MORE_MOE[name] = ("causal", merged, {"lengths": (9, 40), **options})


case("deepseek_v4", V4, {"layer_types": [SLIDING, SPARSE, HEAVY, SPARSE], "rope_scaling": YARN,
                         "compress_rates": {SPARSE: 4, HEAVY: 8}})
case("deepseek_v4_ratios", V4, {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3, "num_hash_layers": 0,
                                "rope_scaling": YARN, "hc_mult": 2, "index_topk": 64}, lengths=(9, 150))
case("deepseek_v4_heavy", V4, {"num_hidden_layers": 2, "compress_rate_hca": 3, "num_hash_layers": 2, "hc_mult": 4,
                               "hc_sinkhorn_iters": 1, "sliding_window": 3, "n_routed_experts": 5,
                               "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0})
case("deepseek_v4_default_layers", V4, {
    "compress_rate_csa": 3, "compress_rate_hca": 5, "num_hash_layers": 0, "index_topk": 5, "sliding_window": 70,
    "scoring_func": "sigmoid", "hc_mult": 2, "o_groups": 4, "o_lora_rank": 6, "qk_rope_head_dim": 4}, lengths=(2, 31))
