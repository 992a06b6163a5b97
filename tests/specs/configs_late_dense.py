"""Configurations of families of late 2026 and of some older ones: name -> (config, options), as in configs_2026.py."""

from tests.specs.configs_2026 import COMMON, GROUPS, RMS, TURNS, family
from tests.specs.configs_other import TINY

LATE_DENSE: dict[str, tuple[dict, dict]] = {}
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 16}


def case(name: str, *parts: dict, leave: tuple[str, ...] = (), **options) -> None:
    """Add a case whose config is the union of `parts` without the keys `leave`."""
    merged: dict = {}
    for part in parts:
        merged |= part
    LATE_DENSE[name] = ({key: value for key, value in merged.items() if key not in leave}, options)


case("exaone", RMS, family("Exaone", "exaone"), {
    "activation_function": "silu", "layer_norm_epsilon": 1e-6, "num_layers": 3, "rope_scaling": LLAMA3,
    "tie_word_embeddings": True}, leave=("hidden_act", "rms_norm_eps", "num_hidden_layers", "head_dim"),
     lengths=(9, 40))
case("iquestcoder", RMS, family("IQuestCoder", "iquestcoder"), {"rope_theta": 500000.0, "attention_bias": True})
case("ministral", RMS, family("Ministral", "ministral"), {
    "sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING]})
case("ministral_window", RMS, family("Ministral", "ministral"), {"sliding_window": 4, "tie_word_embeddings": True})
GRANITE = {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
           "sliding_window": 5}
case("granite_swa", RMS, GRANITE, family("GraniteSWA", "granite_swa"), {
    "layer_types": [SLIDING, FULL, SLIDING], "layer_rope_theta": [10000.0, 0, 500.0]})
case("granite_swa_defaults", RMS, GRANITE, family("GraniteSWA", "granite_swa"), {
    "num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True, "rope_theta": 500.0},
     leave=("tie_word_embeddings",))
case("granitemoe_swa", RMS, GRANITE, family("GraniteMoeSWA", "granitemoe_swa"), {
    "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
    "layer_types": [FULL, SLIDING, SLIDING], "layer_rope_theta": [0, 10000.0, 500.0]}, leave=("head_dim",))
case("granitemoe_swa_defaults", RMS, GRANITE, family("GraniteMoeSWA", "granitemoe_swa"), {
    "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 3, "num_hidden_layers": 5,
    "shared_intermediate_size": 12, "tie_word_embeddings": True}, leave=("head_dim",))
case("hyperclovax", RMS, family("HyperCLOVAX", "hyperclovax"), {
    "embedding_multiplier": 5.0, "logits_scaling": 0.25, "residual_multiplier": 0.6, "attention_multiplier": 0.1})
case("hyperclovax_plain", RMS, family("HyperCLOVAX", "hyperclovax"), {
    "use_post_norm": False, "attention_multiplier": None, "tie_word_embeddings": True, "attention_bias": True})
LATENT = RMS | {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 28, "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 8, "v_head_dim": 14}
case("youtu", LATENT, family("Youtu", "youtu"), {
    "rope_scaling": None, "rope_interleave": True}, leave=("head_dim", "tie_word_embeddings"))
case("youtu_plain_query", LATENT, family("Youtu", "youtu"), {
    "q_lora_rank": None, "rope_interleave": False, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
     leave=("head_dim", "rope_theta"), lengths=(9, 30))
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.9], "long_factor": [1.0, 1.4, 3.0, 9.0]}
case("minicpm3", LATENT, family("MiniCPM3", "minicpm3"), {
    "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_scaling": LONG | {
        "original_max_position_embeddings": 64}}, leave=("head_dim", "v_head_dim"))
case("minicpm3_plain_query", LATENT, family("MiniCPM3", "minicpm3"), {
    "q_lora_rank": None, "scale_emb": 3.0, "scale_depth": None, "dim_model_base": None, "rope_scaling": LONG | {
        "original_max_position_embeddings": 16}}, leave=("head_dim", "tie_word_embeddings"), lengths=(9, 30))
MISTRAL4 = LATENT | GROUPS | family("Mistral4", "mistral4") | {
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2,
                  "original_max_position_embeddings": 8}
# transformers has it among the models that also see.
case("mistral4", MISTRAL4, {"rope_parameters": GROWING}, leave=("head_dim", "rope_theta"), lengths=(9, 30),
     kind="multimodal")
case("mistral4_groups", MISTRAL4, {
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "norm_topk_prob": False, "q_lora_rank": None,
    "rope_interleave": False, "rope_parameters": GROWING | {"mscale_all_dim": 0.7}}, leave=("head_dim", "rope_theta"),
     lengths=(9, 30), kind="multimodal")
case("mistral4_multimodal", {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 200,
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 8},
    "text_config": {key: value for key, value in (MISTRAL4 | {"rope_parameters": GROWING}).items()
                    if key not in ("head_dim", "rope_theta", "architectures")}},
     kind="multimodal", lengths=(9, 30))
KINDS = {"full_attention": YARN | {"rope_theta": 500000.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
WINDOWS = {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
case("mellum", RMS, WINDOWS, EXPERTS, family("Mellum", "mellum"), {
    "norm_topk_prob": True, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": KINDS},
     leave=("rope_theta",), lengths=(9, 30))
case("mellum_sparse", RMS, WINDOWS, EXPERTS, family("Mellum", "mellum"), {
    "norm_topk_prob": True, "rope_parameters": KINDS}, leave=("rope_theta",), lengths=(9, 30))
case("mellum_defaults", RMS, EXPERTS, family("Mellum", "mellum"), {
    "norm_topk_prob": False, "tie_word_embeddings": True, "attention_bias": True}, leave=("rope_theta",))
LAGUNA = RMS | EXPERTS | family("Laguna", "laguna") | {
    "shared_expert_intermediate_size": 12, "moe_routed_scaling_factor": 1.7, "attention_bias": False}
case("laguna", LAGUNA, WINDOWS, {
    "gating": True, "num_attention_heads_per_layer": [6, 4, 2], "moe_router_logit_softcapping": 1.5,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": {
        "full_attention": KINDS["full_attention"] | {"partial_rotary_factor": 0.5},
        "sliding_attention": KINDS["sliding_attention"]}}, leave=("rope_theta",), lengths=(9, 30))
case("laguna_by_column", LAGUNA, {"gating": "per-element", "sliding_window": 5, "head_dim": 12}, leave=("rope_theta",))
case("kolibri1", RMS, WINDOWS, EXPERTS, family("Kolibri1", "kolibri1"), {
    "shared_expert_intermediate_size": 12, "norm_topk_prob": True}, leave=("intermediate_size",))
case("kolibri1_defaults", RMS, EXPERTS, family("Kolibri1", "kolibri1"), {
    "num_hidden_layers": 5, "sliding_window": 4, "shared_expert_intermediate_size": 8, "head_dim": 12},
     leave=("intermediate_size", "tie_word_embeddings"))
LFM3 = COMMON | family("Lfm3", "lfm3") | {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 4,
                                            "sliding_window": 5, "pad_token_id": 0}
case("lfm3", LFM3, {"layer_types": ["conv", FULL, SLIDING], "tie_word_embeddings": True}, lengths=(2, 30))
case("lfm3_plain", LFM3, {
    "num_hidden_layers": 5, "conv_bias": True, "attention_bias": True, "use_sandwich_norm": False,
    "use_attention_gate": False, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "proportional", "rope_theta": 200.0, "partial_rotary_factor": 0.25}}},
     lengths=(2, 30))
COHERE = COMMON | family("Cohere2Moe", "cohere2_moe") | {
    "layer_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "logit_scale": 0.25, "sliding_window": 5,
    "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "attention_bias": False}
case("cohere2_moe", COHERE, {
    "expert_selection_fn": "sigmoid", "num_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 5,
    "prefix_dense_intermediate_size": 40, "tie_word_embeddings": True})
case("cohere2_moe_sum", COHERE, {
    "num_shared_experts": 2, "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-6,
    "layer_types": [FULL, SLIDING, FULL], "mlp_layer_types": ["sparse", "dense", "sparse"]})
GEMMA = COMMON | {
    "model_type": "gemma4_unified_text", "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL], "global_head_dim": 32,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True, "intermediate_size": 40, "use_bidirectional_attention": "vision"}
case("gemma4_unified", GEMMA, {"architectures": ["Gemma4UnifiedForCausalLM"], "num_hidden_layers": 2,
                               "layer_types": [SLIDING, FULL]})
case("gemma4_unified_multimodal", {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified", "image_token_id": 200,
    "audio_token_id": 201, "video_token_id": 202,
    "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 2,
                      "pooling_kernel_size": 1, "output_proj_dims": 16},
    "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 12},
    "text_config": GEMMA | {"rope_parameters": TURNS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}},
     kind="multimodal")
PERSIMMON = COMMON | family("Persimmon", "persimmon") | {
    "layer_norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 25000.0}
case("persimmon", PERSIMMON, {"qk_layernorm": True}, leave=("head_dim", "num_key_value_heads"))
case("persimmon_plain", PERSIMMON, {"qk_layernorm": False, "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
     leave=("head_dim", "num_key_value_heads"))
XGLM = {"vocab_size": 203, "d_model": 48, "num_layers": 2, "attention_heads": 4, "ffn_dim": 72,
        "activation_function": "gelu", "max_position_embeddings": 64, "pad_token_id": 1}
case("xglm", XGLM, family("XGLM", "xglm"), {"scale_embedding": True})
case("xglm_relu", XGLM, family("XGLM", "xglm"), {
    "scale_embedding": False, "activation_function": "relu", "tie_word_embeddings": False})
case("falcon_mamba", family("FalconMamba", "falcon_mamba"), {
    "vocab_size": 203, "hidden_size": 40, "num_hidden_layers": 2, "expand": 2, "state_size": 12, "conv_kernel": 4,
    "pad_token_id": 0, "time_step_rank": 5, "layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-5, "hidden_act": "silu",
    "use_bias": False, "use_conv_bias": True}, lengths=(2, 37))
case("falcon_mamba_biased", family("FalconMamba", "falcon_mamba"), {
    "vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0,
    "use_bias": True, "tie_word_embeddings": False, "mixer_rms_eps": 1e-2}, lengths=(2, 37))
CODEGEN = family("CodeGen", "codegen") | {
    "vocab_size": 203, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 8,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}
case("codegen", CODEGEN)
case("codegen_tied", CODEGEN, {"n_head": 6, "rotary_dim": 4, "n_inner": 40, "activation_function": "gelu",
                               "tie_word_embeddings": True})
case("ernie", TINY, {"architectures": ["ErnieForMaskedLM"], "model_type": "ernie", "num_hidden_layers": 2}, {
    "use_task_id": True, "task_type_vocab_size": 3}, kind="masked", types=True)
case("ernie_hidden", TINY, {"architectures": ["ErnieModel"], "model_type": "ernie"}, {
    "hidden_size": 48, "hidden_act": "relu", "num_hidden_layers": 2}, kind="hidden", leave=("layer_norm_eps",))
