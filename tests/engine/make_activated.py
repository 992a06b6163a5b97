"""Writes expected/activated.json: logits and texts of PEFT with an activated adapter (aLoRA) on a tiny model.

    python -m tests.engine.make_activated

Run it from the repository root in an environment with torch, transformers, PEFT, tokenizers, safetensors and NumPy.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.formats.peft import PREFIX, pair, write_adapter
from tests.server.tiny import write_chat_model

INVOCATION = [7, 8, 9]
SHAPES = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
          "mlp.down_proj": (32, 48)}
# Tokens before, two invocations, no invocation, the invocation alone, and an invocation that begins twice.
TEXTS = [[20, 31, 7, 8, 9, 45, 60, 33], [20, 7, 8, 9, 31, 45, 7, 8, 9, 33, 9, 77], [20, 31, 45, 60, 33], [7, 8, 9],
         [5, 7, 8, 7, 8, 9]]
STEP = 33  # every column that is a multiple of it is stored


def write_activated(folder, seed: int = 0, **config):
    """An adapter with invocation tokens for the model of write_chat_model. Returns its folder."""
    tensors = {}
    for layer in range(2):
        for module, shape in SHAPES.items():
            name = f"model.layers.{layer}.{module}"
            tensors |= pair(name, shape, seed=layer + seed)
            tensors |= {f"{PREFIX}{name}.lora_B.bias": np.linspace(-0.5, 0.5, shape[0], dtype=np.float32)}
    targets = [name.partition(".")[2] for name in SHAPES]
    return write_adapter(folder, tensors, **{"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM",
                                             "lora_bias": True, "target_modules": targets} | config)


def main() -> None:
    """Write the file."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        base = write_chat_model(Path(place) / "base")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, write_activated(Path(place) / "adapter")).eval()
        found = []
        for text in TEXTS:
            ids = torch.tensor([text])
            greedy = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None,
                                    pad_token_id=0)
            found.append({"logits": model(ids).logits[0, :, ::STEP].numpy().round(6).tolist(),
                          "greedy": greedy[0, len(text):].tolist()})
    path = Path(__file__).parent / "expected" / "activated.json"
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
