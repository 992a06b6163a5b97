"""Configurations of further decoders: name -> (kind, config, options), as in configs_more_decoders.py."""

from tests.specs.configs_decoder import noting

FURTHER_DECODERS: dict[str, tuple[str, dict, dict]] = {}
case = noting(FURTHER_DECODERS)

SHARED = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "pad_token_id": 0,
          "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "mamba_d_state": 8,
          "mamba_expand": 2, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_conv": 4, "adapter_rank": 6,
          "num_mem_blocks": 2, "hidden_act": "gelu", "chunk_size": 16}
MIXED = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"], "hybrid_layer_ids": [1, 3, 4]}
# Without a residual in the shared block rounding grows: float32 is up to 2e-4 away from float64 in larger ones.
case("zamba2", "Zamba2ForCausalLM", "zamba2", SHARED, MIXED, {
    "use_mem_rope": True, "rope_theta": 10000.0, "mamba_d_state": 12})
case("zamba2_adapted", "Zamba2ForCausalLM", "zamba2", SHARED, MIXED, {
    "use_shared_attention_adapter": True, "add_bias_linear": True, "mamba_ngroups": 1,
    "time_step_min": 0.7})
case("zamba2_one_block", "Zamba2ForCausalLM", "zamba2", SHARED, {
    "layers_block_type": ["hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [0, 2], "num_hidden_layers": 3,
    "num_mem_blocks": 1, "tie_word_embeddings": False, "hidden_act": "silu"})
