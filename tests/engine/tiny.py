"""A tiny decoder checkpoint in the format of model hubs."""

import json

import numpy as np
from safetensors.numpy import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
          "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 50,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
          "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "float32"}


def write_checkpoint(folder, dtype=np.float32, **config):
    """config.json and model.safetensors with random weights, no tokenizer. config: further keys of it, of which none
    changes a shape. Returns the folder."""
    folder.mkdir(exist_ok=True)
    save_file(random_tensors(50, 0, dtype), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def random_tensors(vocabulary, seed, dtype=np.float32):
    """Weights of a Llama of two layers, 32 wide."""
    rng, d, f, v, kv = np.random.default_rng(seed), 32, 48, vocabulary, 16
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {at + "self_attn.q_proj.weight": (d, d), at + "self_attn.k_proj.weight": (kv, d),
                   at + "self_attn.v_proj.weight": (kv, d), at + "self_attn.o_proj.weight": (d, d),
                   at + "mlp.gate_proj.weight": (f, d), at + "mlp.up_proj.weight": (f, d),
                   at + "mlp.down_proj.weight": (d, f), at + "input_layernorm.weight": (d,),
                   at + "post_attention_layernorm.weight": (d,)}
    return {name: (0.3 * rng.standard_normal(shape) + (len(shape) == 1)).astype(dtype)
            for name, shape in shapes.items()}
