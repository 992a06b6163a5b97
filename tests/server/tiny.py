"""A tiny decoder with random weights, a byte-level tokenizer and a chat template: everything a service needs."""

import json

import numpy as np
from safetensors.numpy import save_file

from tests.engine.tiny import random_tensors

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CONTEXT = 512
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\nAnswer calls as <tool_call>{\"name\": ..., "
    "\"arguments\": ...}</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if enable_thinking %}<think>\n{% endif %}")


def write_chat_model(folder, seed: int = 0):
    """A model that writes printable letters at random. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    printable, size = _write_tokenizer(folder)
    tensors = random_tensors(size, seed)
    rare = np.ones(size, bool)
    rare[printable] = False
    tensors["lm_head.weight"][rare] *= 0.01  # other bytes are improbable
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": size,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"}))
    return folder


def _write_tokenizer(folder) -> tuple[list[int], int]:
    """tokenizer.json with a token for each byte. Returns the ids of printable letters, and the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {text: id for id, text in enumerate(SPECIAL)}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab |= {letter: id for id, letter in enumerate(letters, len(SPECIAL))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "add_bos_token": False}))
    return [vocab[letter] for letter in letters if "!" <= letter <= "~" or letter == "Ġ"], len(vocab)
