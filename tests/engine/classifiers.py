"""Tiny classifiers and rerankers on disk."""

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.published import write_case
from tests.specs.weights import values

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "large", "."]


def classifier(folder, labels=1, case="bert", head=(), architecture="BertForSequenceClassification", **config):
    """A case with a head of scores in place of its own. head: names and shapes of its tensors."""
    write_case(case, folder, architectures=[architecture], **config)
    path = folder / "model.safetensors"
    tensors = {name: array for name, array in load_file(path).items() if not name.startswith(("cls.", "lm_head."))}
    width = next(array.shape[1] for name, array in tensors.items() if "word_embeddings" in name or "embed_tok" in name)
    head = head or {"bert.pooler.dense.weight": (width, width), "bert.pooler.dense.bias": (width,),
                    "classifier.weight": (labels, width), "classifier.bias": (labels,)}
    tensors |= {name: values(name, shape).astype(np.float32) for name, shape in head.items()}
    save_file(tensors, path)
    (folder / "vocab.txt").write_text("\n".join([*WORDS, *(f"word{i}" for i in range(203 - len(WORDS)))]) + "\n")
    return folder, tensors
