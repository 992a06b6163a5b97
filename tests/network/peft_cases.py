"""Adapters of PEFT whose modules are cut otherwise than the files of their bases: settings, and their values."""

from pathlib import Path

import numpy as np

from tests.specs.weights import values

FOLDER = Path(__file__).parent / "peft"
EVERY = r".*(q_proj|k_proj|v_proj|gate_proj|up_proj|gate_up_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a)"
SOME = r".*(q_proj|v_proj)"

# Name -> base of tests/specs, settings of LoraConfig.
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
}


def adapter_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of an adapter's tensor: lengths are positive, all else is around 0."""
    found = values(name, shape).astype(np.float32)
    return 0.5 + np.abs(found) if "magnitude" in name else found
