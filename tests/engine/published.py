"""Tiny checkpoints of published families on disk, with the weights that tests/specs makes from their names."""

import json

import numpy as np
from safetensors.numpy import save_file

from tests.specs.case import load_case
from tests.specs.weights import values


def write_case(name, folder, **config):
    """config.json (with these keys added) and model.safetensors of a case of tests/specs. Returns the folder."""
    case = load_case(name)
    (folder / "config.json").write_text(json.dumps(case.configs[0] | config))
    save_file({tensor: values(tensor, shape).astype(np.float32) for tensor, shape in case.tensors.items()},
              folder / "model.safetensors")
    return folder


def write_letters(folder, size):
    """tokenizer.json with so many tokens: <s>, </s> and single bytes, letters among them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())][:size]
    tokenizer = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
