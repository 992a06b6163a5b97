"""A small decoder with a tokenizer, as published on model hubs, whose matrices are large enough to be quantised."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

WIDTH, HIDDEN, VOCABULARY, LAYERS = 64, 96, 257, 2
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
          "intermediate_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": LAYERS,
          "vocab_size": VOCABULARY, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 256}
TEXT = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer; " for i in range(40))


def write_model(folder, ffn=HIDDEN, change=None):
    """Write config.json, tokenizer.json and model.safetensors; returns the folder. change(tensors) may modify the
    tensors."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,),
              "lm_head.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (ffn, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (WIDTH, ffn), f"{at}input_layernorm.weight": (WIDTH,),
                   f"{at}post_attention_layernorm.weight": (WIDTH,)}
    tensors = {name: (0.1 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
               for name, shape in shapes.items()}
    if change:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": ffn}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({**{letter: i for i, letter in enumerate(letters)}, "<s>": 256}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
