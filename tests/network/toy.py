"""A tiny checkpoint in memory: random float32 tensors under the names of the configuration's family."""

from pathlib import Path

import numpy as np

from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def shapes(config=CONFIG, vocabulary=40) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a plain gated decoder."""
    d, f = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": (vocabulary, d), "model.norm.weight": (d,), "lm_head.weight": (vocabulary, d)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found |= {f"{at}self_attn.{n}_proj.weight": (r, d) for n, r in (("q", d), ("k", kv), ("v", kv), ("o", d))}
        found |= {
            f"{at}mlp.gate_proj.weight": (f, d),
            f"{at}mlp.up_proj.weight": (f, d),
            f"{at}mlp.down_proj.weight": (d, f),
        }
        found |= {f"{at}input_layernorm.weight": (d,), f"{at}post_attention_layernorm.weight": (d,)}
    return found


def checkpoint(config=CONFIG, tensors=None, naming="hf") -> Checkpoint:
    """A checkpoint of these tensors; each tensor's values are seeded by its name."""

    def tensor(name, shape):
        values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        raw = values.reshape(-1, shape[-1] if shape else 1).view(np.uint8)
        return Tensor(name, tuple(shape), TYPES["F32"], lambda: raw)

    tensors = shapes(config) if tensors is None else tensors
    return Checkpoint(Path("toy"), "safetensors", naming, {n: tensor(n, s) for n, s in tensors.items()}, config)
