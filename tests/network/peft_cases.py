"""PEFT adapters whose modules are fused otherwise than the base's files, and adapters of PEFT's other methods: settings
and values.
"""

from pathlib import Path

import numpy as np

from tests.specs.weights import values

FOLDER = Path(__file__).parent / "peft"
EVERY = r".*(q_proj|k_proj|v_proj|gate_proj|up_proj|gate_up_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a)"
SOME = r".*(q_proj|v_proj)"

# Name -> base of tests/specs, settings of LoraConfig, or of the configuration of another method ("peft_type").
CASES = {
    "nomic_bert": ("nomic_bert", {"target_modules": EVERY}),
    "nomic_bert_lengths": ("nomic_bert", {"target_modules": SOME, "use_dora": True}),
    "jina_embeddings_v3": ("jina_embeddings_v3", {"target_modules": SOME, "lora_bias": True}),
    "gte": ("gte", {"target_modules": EVERY, "bias": "lora_only"}),
    "gte_saved": ("gte", {"target_modules": ["down_proj"], "modules_to_save": ["k_proj", "up_proj"]}),
    "sarvam_moe": ("sarvam_moe", {"target_modules": SOME, "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "lara_mini": ("lara_mini", {"target_modules": EVERY}),
    "minimax_m3": ("minimax_m3_full", {"target_modules": r".*(q_proj|gate_up_proj)", "use_dora": True}),
    "minimax_m3_saved": ("minimax_m3_full", {"target_modules": ["q_proj"], "modules_to_save": ["gate_up_proj"]}),
    "step3p7": ("step3p7", {"target_modules": ["q_proj"], "target_parameters": [
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "longcat": ("longcat_flash", {"target_modules": ["o_proj"], "target_parameters": [
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "inkling": ("inkling_text", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    "hrm_text": ("hrm_text_once", {"target_modules": "all-linear", "rank_pattern": {"o_proj": 2}}),
    "lfm2_head": ("lfm2", {"target_modules": ["lm_head", "out_proj"]}),
    "head_and_tokens": ("qwen2", {"target_modules": ["lm_head", "v_proj"], "trainable_token_indices": [1, 7, 9]}),
    "ia3": ("gte", {"peft_type": "IA3", "target_modules": ["k_proj", "v_proj", "down_proj"],
                    "feedforward_modules": ["down_proj"]}),
    "ia3_turned": ("gpt2", {"peft_type": "IA3", "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True,
                            "feedforward_modules": ["mlp.c_proj"]}),
    "loha": ("nomic_bert", {"peft_type": "LOHA", "target_modules": SOME, "r": 2, "alpha": 3,
                            "alpha_pattern": {"q_proj": 1}}),
    "lokr": ("qwen2", {"peft_type": "LOKR", "target_modules": ["q_proj", "down_proj", "lm_head"], "r": 2, "alpha": 3,
                       "decompose_both": True}),
    "lokr_whole": ("gpt_neox_serial", {"peft_type": "LOKR", "target_modules": ["dense", "query_key_value"], "r": 16,
                                       "alpha": 3, "decompose_factor": 4}),
    "vera": ("gte", {"peft_type": "VERA", "target_modules": EVERY, "r": 4, "bias": "vera_only"}),
    "adalora": ("qwen2", {"peft_type": "ADALORA", "target_modules": ["q_proj", "down_proj"], "init_r": 3,
                          "total_step": 9, "lora_alpha": 5}),
    "oft": ("qwen2", {"peft_type": "OFT", "target_modules": ["embed_tokens", "q_proj"], "oft_block_size": 4, "r": 0,
                      "use_cayley_neumann": True, "num_cayley_neumann_terms": 3}),
    "oft_exact": ("nomic_bert", {"peft_type": "OFT", "target_modules": SOME, "oft_block_size": 0, "r": 4, "coft": True,
                                 "eps": 0.5, "block_share": True, "use_cayley_neumann": False}),
    "boft": ("qwen2", {"peft_type": "BOFT", "target_modules": ["q_proj", "down_proj"], "boft_block_size": 4}),
}
POSITIVE = ("magnitude", "ia3_l", "boft_s")
FACTORS = {"lokr_": 0.7, "oft_": 0.2, "vera_": 0.3, "tokens_delta": 0.3}
MERGED = ("head_and_tokens",)  # what cannot be one request's alone


def adapter_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of an adapter's tensor: positive for magnitudes and scales, around 0 for others."""
    found = values(name, shape).astype(np.float32)
    if any(word in name for word in POSITIVE):
        return 0.5 + np.abs(found)
    return found * np.float32(next((factor for word, factor in FACTORS.items() if word in name), 1))
