"""Base configurations: those of a folder of checkpoints, else a few small ones."""

import json
from pathlib import Path

_ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3,
            "vocab_size": 144, "max_position_embeddings": 256}
_SIZES = _ENCODER | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SMALL = {
    "llama": _SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": _SIZES | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                                      "head_dim": 16},
    "gemma3_text": _SIZES | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
                             "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 32, "num_heads": 8,
               "head_dim": 8, "state_size": 16, "n_groups": 2, "num_hidden_layers": 3, "vocab_size": 144},
    "bert": _ENCODER | {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
}


def bases(folder: str, families: str) -> dict[str, dict]:
    """Name -> configuration. folder: of folders with a config.json each, or several such, with commas; "": SMALL."""
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))
             for each in folder.split(",") if each for path in sorted(Path(each).glob("*/config.json"))} or SMALL
    wanted = [name for name in families.split(",") if name] or list(found)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise SystemExit(f"no base {missing[0]!r}; there are {', '.join(found)}")
    return {name: found[name] for name in wanted}
