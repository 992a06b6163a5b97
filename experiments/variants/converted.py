"""llama.cpp's converter: a float32 GGUF file of a checkpoint, without the words of its vocabulary.

The converter runs in the process of transformers, which it needs too. Some of its classes read a tokenizer, so a
tokenizer whose words are numbers is beside the checkpoint.
"""

import json
import sys
from pathlib import Path

import torch

NAME = "model.gguf"


def convert(folder: Path, converter: str) -> None:
    """Write model.gguf beside the checkpoint. converter: llama.cpp's convert_hf_to_gguf.py."""
    root = Path(converter).resolve().parent
    if str(root) not in sys.path:
        sys.path[:0] = [str(root / "gguf-py"), str(root)]
    import conversion
    import gguf

    hparams = conversion.ModelBase.load_hparams(folder, False)
    known = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))

    text = hparams.get("text_config") or hparams
    count = text.get("vocab_size", hparams.get("vocab_size"))
    tokenizer(folder, count)

    def ids_alone(self) -> None:
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(count)
        self.gguf_writer.add_token_type_count(text.get("type_vocab_size") or 1)

    plain = type(known.__name__, (known,), {"set_vocab": ids_alone, "model_arch": known.model_arch, "no_mtp": True})
    with torch.inference_mode():
        plain(folder, gguf.LlamaFileType.ALL_F32, folder / NAME).write()


def tokenizer(folder: Path, count: int) -> None:
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(count)}, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
