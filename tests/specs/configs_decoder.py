"""Configurations of decoder-only families."""

DECODERS: dict[str, tuple[dict, dict]] = {}


def case(name: str, *parts: dict, **options) -> None:
    """Add a case whose config is the union of `parts`."""
    merged: dict = {}
    for part in parts:
        merged |= part
    DECODERS[name] = (merged, options)


def noting(table: dict[str, tuple[str, dict, dict]]):
    """A function that adds cases to `table`; a case's config is the union of `parts`."""
    def case(name: str, architecture: str, model_type: str, *parts: dict, kind: str = "causal", **options) -> None:
        merged: dict = {"architectures": [architecture], "model_type": model_type}
        for part in parts:
            merged |= part
        table[name] = (kind, merged, options)

    return case


def family(name: str, model_type: str) -> dict:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type}


TINY = {"vocab_size": 203, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = TINY | {"num_key_value_heads": 2, "intermediate_size": 88, "max_position_embeddings": 64,
                  "tie_word_embeddings": False}
RMS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}

LLAMA = GROUPED | RMS | family("Llama", "llama") | {"attention_bias": False, "mlp_bias": False}
case("llama3_scaled", LLAMA, {"rope_theta": 500000.0, "tie_word_embeddings": True, "head_dim": 16, "rope_scaling": {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    "rope_type": "llama3"}}, lengths=(9, 17, 40))
case("llama_linear", LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0}})
case("llama_dynamic", LLAMA, {"max_position_embeddings": 12, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
case("llama_yarn", LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                            "original_max_position_embeddings": 16}},
     lengths=(9, 40))
case("llama_biased", LLAMA, {"attention_bias": True, "mlp_bias": True, "head_dim": 24})
MISTRAL = GROUPED | RMS | family("Mistral", "mistral")
case("mistral", MISTRAL, {"sliding_window": 5})
case("mistral_nemo", MISTRAL, {"sliding_window": None, "head_dim": 24, "rope_theta": 1000000.0})
case("mixtral", GROUPED | RMS | family("Mixtral", "mixtral"), {
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5})

QWEN = GROUPED | RMS | {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 4,
                        "max_window_layers": 1}
case("qwen2", QWEN, family("Qwen2", "qwen2"), {"tie_word_embeddings": True})
case("qwen2_window", QWEN, family("Qwen2", "qwen2"), {"use_sliding_window": True})
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "decoder_sparse_step": 1,
       "mlp_only_layers": []}
QWEN_MOE = QWEN | MOE | family("Qwen2Moe", "qwen2_moe") | {"shared_expert_intermediate_size": 72,
                                                           "norm_topk_prob": False}
case("qwen2_moe", QWEN_MOE)
case("qwen2_moe_sparse", QWEN_MOE, {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3],
                                    "norm_topk_prob": True})
QWEN3 = QWEN | {"head_dim": 24, "attention_bias": False, "sliding_window": None, "max_window_layers": 3}
case("qwen3", QWEN3, family("Qwen3", "qwen3"), {"tie_word_embeddings": True})
QWEN3_MOE = QWEN3 | MOE | family("Qwen3Moe", "qwen3_moe") | {"norm_topk_prob": True}
case("qwen3_moe", QWEN3_MOE)
case("qwen3_moe_mixed", QWEN3_MOE, {"mlp_only_layers": [1]})

GEMMA = GROUPED | {"head_dim": 24, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh",
                   "attention_bias": False, "pad_token_id": 0}
del GEMMA["tie_word_embeddings"]
case("gemma", GEMMA, family("Gemma", "gemma"), {"num_key_value_heads": 1})
GEMMA2 = GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 5}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
case("gemma2", GEMMA2, family("Gemma2", "gemma2"), CAPS)
case("gemma2_scaled", GEMMA2, family("Gemma2", "gemma2"), CAPS, {"query_pre_attn_scalar": 11})
GEMMA3 = GEMMA2 | family("Gemma3", "gemma3_text") | {"rope_local_base_freq": 10000.0, "rope_theta": 1000000.0}
del GEMMA3["hidden_act"]
case("gemma3", GEMMA3, {"query_pre_attn_scalar": 11, "sliding_window_pattern": 3,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
case("gemma3_one_in_six", GEMMA3, {"num_hidden_layers": 7, "hidden_size": 32})

PHI = GROUPED | family("Phi", "phi") | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.4,
                                        "rope_scaling": None, "rope_theta": 10000.0}
case("phi2", PHI, {"num_key_value_heads": 4, "qk_layernorm": False, "intermediate_size": 256})
case("phi_normed", PHI, {"qk_layernorm": True, "head_dim": 16})
PHI3 = GROUPED | RMS | family("Phi3", "phi3") | {"sliding_window": None, "attention_bias": False, "pad_token_id": 0,
                                                 "eos_token_id": 1}
case("phi3_window", PHI3, {"rope_scaling": None, "sliding_window": 6})
LONG = {"original_max_position_embeddings": 12, "max_position_embeddings": 96}


def longrope(pairs: int) -> dict:
    return {"rope_scaling": {"type": "longrope", "short_factor": [1 + 0.05 * i for i in range(pairs)],
                             "long_factor": [1.5 + 0.7 * i for i in range(pairs)]}}


case("phi3_long", PHI3, LONG, longrope(8))
case("phi4_mini", PHI3, LONG, longrope(6), {"partial_rotary_factor": 0.75, "tie_word_embeddings": True})
case("smollm3", GROUPED | RMS | family("SmolLM3", "smollm3"), {
    "num_hidden_layers": 4, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "rope_theta": 2000000.0,
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": True,
    "pad_token_id": 0,
    "layer_types": ["full_attention"] * 4})

OLMO = GROUPED | {"hidden_act": "silu", "rope_theta": 10000.0, "attention_bias": False, "pad_token_id": 1,
                  "eos_token_id": 0}
case("olmo", OLMO, family("Olmo", "olmo"), {"clip_qkv": None})
case("olmo_clipped", OLMO, family("Olmo", "olmo"), {"clip_qkv": 0.6, "tie_word_embeddings": True})
case("olmo2", OLMO, family("Olmo2", "olmo2"), {"rms_norm_eps": 1e-6})
case("olmo3", OLMO, family("Olmo3", "olmo3"), {
    "rms_norm_eps": 1e-6, "num_hidden_layers": 4, "sliding_window": 5, "rope_theta": 500000.0,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                     "attention_factor": 1.2079,
                     "beta_fast": 32.0, "beta_slow": 1.0}}, lengths=(9, 30))
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False, "rms_norm_eps": 1e-5, "clip_qkv": None}
case("olmoe", OLMO, family("Olmoe", "olmoe"), OLMOE)

STABLELM = GROUPED | family("StableLm", "stablelm") | {
    "layer_norm_eps": 1e-5, "hidden_act": "silu", "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
    "use_qkv_bias": True}
case("stablelm", STABLELM)
case("stablelm_whole", STABLELM, {"partial_rotary_factor": 1.0})
case("stablelm_parallel", STABLELM, {"use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True,
                                     "head_dim": 16})

GPT2 = {"vocab_size": 203, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64, "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new"}
case("gpt2", GPT2, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 64})
case("gpt2_scaled", GPT2, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
                           "scale_attn_by_inverse_layer_idx": True,
                           "n_inner": 100})
case("gptj", GPT2, family("GPTJ", "gptj"), {"rotary_dim": 8, "n_inner": None, "tie_word_embeddings": False})
NEOX = GROUPED | family("GPTNeoX", "gpt_neox") | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.25,
                                                  "rotary_emb_base": 10000, "use_parallel_residual": True}
del NEOX["num_key_value_heads"]
case("pythia", NEOX)
case("gpt_neox_serial", NEOX, {"use_parallel_residual": False, "rotary_pct": 1.0})
STARCODER2 = GROUPED | family("Starcoder2", "starcoder2") | {
    "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh",
    "rope_theta": 100000.0,
    "norm_type": "layer_norm", "mlp_type": "default", "tie_word_embeddings": True}
case("starcoder2", STARCODER2)
case("starcoder2_window", STARCODER2, {"sliding_window": 5})

DEEPSEEK = GROUPED | RMS | {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "attention_bias": False, "norm_topk_prob": False}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 16, "type": "yarn"}
V2 = DEEPSEEK | family("DeepseekV2", "deepseek_v2") | {
    "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
case("deepseek_v2_lite", V2)
case("deepseek_v2", V2, {"q_lora_rank": 28, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                         "routed_scaling_factor": 16.0})
V3 = DEEPSEEK | family("DeepseekV3", "deepseek_v3") | {
    "q_lora_rank": 28, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
case("deepseek_v3", V3, lengths=(9, 30))
case("moonlight", V3, {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_scaling": None})

GRANITE = GROUPED | RMS | {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.11,
                           "logits_scaling": 4.0, "attention_bias": False, "tie_word_embeddings": True}
case("granite", GRANITE, family("Granite", "granite"), {"mlp_bias": False})
case("granitemoe", GRANITE, family("GraniteMoe", "granitemoe"), {"num_local_experts": 5, "num_experts_per_tok": 2})
case("granitemoe_shared", GRANITE, family("GraniteMoeShared", "granitemoeshared"), {
    "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40})
COHERE = GROUPED | {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "hidden_act": "silu", "rope_theta": 10000.0,
                    "attention_bias": False, "pad_token_id": 0}
del COHERE["tie_word_embeddings"]
case("cohere", COHERE, family("Cohere", "cohere"), {"use_qk_norm": False})
case("cohere_normed", COHERE, family("Cohere", "cohere"), {"use_qk_norm": True})
case("cohere2", COHERE, family("Cohere2", "cohere2"), {
    "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 4, "head_dim": 16,
    "order_of_interleaved_layers":
    "local_attn_first", "rotary_pct": 1.0})
GPT_OSS = GROUPED | RMS | family("GptOss", "gpt_oss") | {
    "head_dim": 24, "attention_bias": True, "num_local_experts": 5, "num_experts_per_tok": 2, "experts_per_token": 2,
    "swiglu_limit": 7.0, "sliding_window": 5, "rope_theta": 150000, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 16,
                     "rope_type": "yarn", "truncate": False}}
case("gpt_oss", GPT_OSS, lengths=(9, 30))
case("gpt_oss_clamped", GPT_OSS, {"swiglu_limit": 0.8})

FALCON = TINY | family("Falcon", "falcon") | {"layer_norm_epsilon": 1e-5, "bias": False, "alibi": False}
# The eager code of transformers 5.23 adds the position bias twice.
case("falcon_rw", FALCON, {"alibi": True, "bias": True, "multi_query": False, "new_decoder_architecture": False,
                           "parallel_attn": False, "num_attention_heads": 8}, attention="sdpa")
case("falcon_7b", FALCON, {"n_head_kv": 1, "multi_query": True, "new_decoder_architecture": False,
                           "parallel_attn": True})
case("falcon_40b", FALCON, {"multi_query": True, "new_decoder_architecture": True, "parallel_attn": True,
                            "num_kv_heads": 2})
case("falcon2_11b", FALCON, {
    "multi_query": True, "new_decoder_architecture": True, "parallel_attn": True, "num_kv_heads": 2,
    "rope_theta": 500042,
    "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 120, "ff_factor": 4, "activation": "gelu",
    "tie_word_embeddings": False})
case("bloom", {"vocab_size": 203, "n_embed": 96, "n_layer": 3, "num_attention_heads": 6, "layer_norm_epsilon": 1e-5,
               "apply_residual_connection_post_layernorm": False, "pad_token_id": 3}, family("Bloom", "bloom"))
case("mpt", {"architectures": ["MPTForCausalLM"], "model_type": "mpt", "vocab_size": 203, "d_model": 64, "n_heads": 4,
             "n_layers": 3, "expansion_ratio": 3, "max_seq_len": 64, "no_bias": True, "attn_config": {
                 "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "clip_qkv": None, "qk_ln": False}})
OPT = TINY | family("OPT", "opt") | {"ffn_dim": 88, "max_position_embeddings": 64, "activation_function": "relu",
                                     "word_embed_proj_dim": 64, "do_layer_norm_before": True, "pad_token_id": 1}
case("opt", OPT)
case("opt_350m", OPT, {"word_embed_proj_dim": 40, "do_layer_norm_before": False})
GLM = GROUPED | RMS | {"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 16, "pad_token_id": 0,
                       "rms_norm_eps": 1e-5}
case("glm", GLM, family("Glm", "glm"))
case("glm4", GLM, family("Glm4", "glm4"), {"head_dim": 24})

case("arcee", GROUPED | family("Arcee", "arcee"), {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                                                   "attention_bias": False, "mlp_bias": False})
case("seed_oss", LLAMA | family("SeedOss", "seed_oss"), {"attention_bias": True, "attention_out_bias": False,
                                                         "head_dim": 24})
case("helium", LLAMA | family("Helium", "helium"), {"head_dim": 16})
case("ernie4_5", LLAMA | family("Ernie4_5", "ernie4_5"), {"use_bias": False, "tie_word_embeddings": True,
                                                          "head_dim": 24})
case("exaone4", LLAMA | family("Exaone4", "exaone4"), {
    "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": "LLLG", "layer_types":
    ["sliding_attention"] * 3 + ["full_attention"]})
case("exaone4_full", LLAMA | family("Exaone4", "exaone4"), {
    "sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3})
case("nemotron", GROUPED | family("Nemotron", "nemotron"), {
    "hidden_act": "relu2", "norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "mlp_bias": False, "head_dim": 16})
case("hunyuan_dense", LLAMA | family("HunYuanDenseV1", "hunyuan_v1_dense"), {
    "tie_word_embeddings": True, "use_qk_norm": True, "head_dim": 24, "rope_scaling": {
        "alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic"}})
SIGMOID_MOE = {"moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
               "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
GLM_MOE = GROUPED | RMS | SIGMOID_MOE | family("Glm4Moe", "glm4_moe") | {
    "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True, "n_group": 1, "topk_group": 1}
case("glm4_moe", GLM_MOE, {"use_qk_norm": True})
case("glm4_moe_air", GLM_MOE, {"use_qk_norm": False, "routed_scaling_factor": 1.0})
case("dots1", GROUPED | RMS | SIGMOID_MOE | family("Dots1", "dots1"), {
    "n_group": 1, "topk_group": 1, "attention_bias": False, "sliding_window": None,
    "layer_types": ["full_attention"] * 3})
case("starcoder", GPT2, family("GPTBigCode", "gpt_bigcode"), {"multi_query": True,
                                                              "activation_function": "gelu_pytorch_tanh"})
case("gpt_bigcode", GPT2, family("GPTBigCode", "gpt_bigcode"), {"multi_query": False, "n_inner": 100})
case("gpt_neo", family("GPTNeo", "gpt_neo"), {
    "vocab_size": 203, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 64,
    "window_size": 5,
    "attention_types": [[["global", "local"], 1], [["global"], 1]], "attention_layers": ["global", "local", "global"],
    "activation_function": "gelu_new", "intermediate_size": None, "layer_norm_epsilon": 1e-5})

# The language part of models that also see.
EYES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}
case("gemma3_multimodal", {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4,
    "image_token_index": 200, "boi_token_index": 201, "eoi_token_index": 202,
    "vision_config": EYES | {"model_type": "siglip_vision_model"},
    "text_config": GEMMA3 | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "num_hidden_layers": 7,
                             "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}}, kind="multimodal")
case("mistral3", {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 200,
    "vision_config": EYES | {"model_type": "pixtral", "head_dim": 16}, "spatial_merge_size": 2,
    "text_config": MISTRAL | {"sliding_window": None, "head_dim": 24, "rope_theta": 1000000000.0}}, kind="multimodal")

# Short convolutions among attention.
LFM2 = GROUPED | family("Lfm2", "lfm2") | {
    "num_hidden_layers": 4, "norm_eps": 1e-5, "rope_theta": 1000000.0, "conv_bias": False, "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": True, "block_ff_dim": 100, "block_ffn_dim_multiplier": 1.25, "block_multiple_of": 12,
    "full_attn_idxs": [2], "tie_embedding": True}
case("lfm2", LFM2)
case("lfm2_biased", LFM2, {"conv_bias": True, "full_attn_idxs": [0, 3], "block_auto_adjust_ff_dim": False})
case("lfm2_moe", GROUPED | family("Lfm2Moe", "lfm2_moe"), {
    "num_hidden_layers": 4, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "moe_intermediate_size": 24,
    "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "use_expert_bias": True,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
    "layer_types": ["conv", "full_attention", "conv", "conv"]})
