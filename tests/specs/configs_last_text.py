"""Configurations of text models added last: encoders used as decoders, and others."""

from tests.specs.configs_2026 import GROUPS, RMS
from tests.specs.configs_decoder import noting
from tests.specs.configs_late_others import SMALL
from tests.specs.configs_other import ROBERTA, TINY

LAST_TEXT: dict[str, tuple[str, dict, dict]] = {}
case = noting(LAST_TEXT)

DECODES = SMALL | {"is_decoder": True, "use_cache": False}
case("bert_decoder", "BertLMHeadModel", "bert", TINY, DECODES)
case("roberta_decoder", "RobertaForCausalLM", "roberta", ROBERTA, DECODES)
case("xlm_roberta_decoder", "XLMRobertaForCausalLM", "xlm-roberta", ROBERTA, DECODES)
case("camembert_decoder", "CamembertForCausalLM", "camembert", ROBERTA, DECODES)
case("big_bird_decoder", "BigBirdForCausalLM", "big_bird", TINY, DECODES, {"attention_type": "original_full"})
case("data2vec_text_decoder", "Data2VecTextForCausalLM", "data2vec-text", ROBERTA, DECODES)
case("electra_decoder", "ElectraForCausalLM", "electra", TINY, DECODES, {"embedding_size": 24})
case("ernie_decoder", "ErnieForCausalLM", "ernie", TINY, DECODES, {"task_type_vocab_size": 3, "use_task_id": True})
case("megatron_bert_decoder", "MegatronBertForCausalLM", "megatron-bert", TINY, DECODES)
case("rembert_decoder", "RemBertForCausalLM", "rembert", TINY, DECODES, {
    "input_embedding_size": 24, "output_embedding_size": 48})
case("roberta_prelayernorm_decoder", "RobertaPreLayerNormForCausalLM", "roberta-prelayernorm", ROBERTA, DECODES)
case("roformer_decoder", "RoFormerForCausalLM", "roformer", TINY, DECODES, {
    "embedding_size": 24, "rotary_value": False}, kept=("embed_positions.weight",))
case("xlm_roberta_xl_decoder", "XLMRobertaXLForCausalLM", "xlm-roberta-xl", ROBERTA, DECODES)
case("xmod_decoder", "XmodForCausalLM", "xmod", ROBERTA, DECODES, {
    "languages": ["en_XX", "de_DE"], "default_language": "de_DE", "adapter_reduction_factor": 4})
case("bert_generation_decoder", "BertGenerationDecoder", "bert-generation", TINY, DECODES)

SLIDING, FULL = "sliding_attention", "full_attention"
WITHOUT = {"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 500.0}, FULL: None}}
BEAM = {key: value for key, value in (RMS | GROUPS).items() if key != "rope_theta"} | WITHOUT | {
    "num_experts": 6, "sliding_window": 5, "n_group": 3, "topk_group": 2}
case("beam", "BeamForCausalLM", "beam", BEAM, {
    "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "final_logit_softcapping": 6.0}, lengths=(9, 20))
case("beam_defaults", "BeamForCausalLM", "beam", BEAM, {"num_hidden_layers": 8, "norm_topk_prob": False})

DIFFERENCES = RMS | {"attention_bias": False}
case("diffllama", "DiffLlamaForCausalLM", "diffllama", DIFFERENCES, {"num_key_value_heads": 4})
case("diffllama_grouped", "DiffLlamaForCausalLM", "diffllama", DIFFERENCES, {
    "num_attention_heads": 8, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True})
case("doge", "DogeForCausalLM", "doge", RMS, {"attention_bias": True, "mlp_bias": True}, lengths=(9, 30))
case("doge_heads", "DogeForCausalLM", "doge", RMS, {"num_key_value_heads": 4, "tie_word_embeddings": True})
GEMMA = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 12,
         "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "embedding_dim": 24,
         "sliding_window": 3, "max_position_embeddings": 64}
case("embedding_gemma2_text", "EmbeddingGemma2TextModel", "embedding_gemma2_text", GEMMA, {
    "global_head_dim": 16, "num_global_key_value_heads": 1, "layer_types": [SLIDING, SLIDING, FULL]}, kind="hidden")
case("embedding_gemma2", "EmbeddingGemma2Model", "embedding_gemma2", {"text_config": GEMMA | {
    "model_type": "embedding_gemma2_text", "num_hidden_layers": 2, "global_head_dim": 20,
    "num_global_key_value_heads": 2}, "vision_config": None, "audio_config": None}, kind="hidden")
ZAMBA = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "rms_norm_eps": 1e-5,
         "num_attention_heads": 4, "num_key_value_heads": 4, "mamba_d_state": 6, "mamba_dt_rank": 5,
         "max_position_embeddings": 64}
case("zamba", "ZambaForCausalLM", "zamba", ZAMBA, {
    "n_mamba_heads": 2, "num_hidden_layers": 6, "attn_layer_period": 4, "attn_layer_offset": 2})
case("zamba_named", "ZambaForCausalLM", "zamba", ZAMBA, {
    "n_mamba_heads": 4, "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba"], "mamba_dt_rank": "auto",
    "mamba_d_conv": 3, "attention_head_dim": 12, "num_key_value_heads": 2, "tie_word_embeddings": False})
JET = {"vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 3, "kv_channels": 8,
       "intermediate_size": 20, "num_local_experts": 5, "max_position_embeddings": 64, "rms_norm_eps": 1e-4}
case("jetmoe", "JetMoeForCausalLM", "jetmoe", JET)
case("jetmoe_three", "JetMoeForCausalLM", "jetmoe", JET, {"num_experts_per_tok": 3, "tie_word_embeddings": False})
