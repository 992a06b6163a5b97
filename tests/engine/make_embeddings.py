"""Writes expected/embeddings.json: what transformers computes with the real model all-MiniLM-L6-v2.

    python -m tests.engine.make_embeddings FOLDER_OF_THE_MODEL

Run it in an environment with torch and transformers. The embedding is made as the model's own files say: the mean of
the last hidden states over the attention mask, and texts cut after 256 tokens.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "This is an example sentence", "Each sentence is converted", "", "a", "Ünïcödé, straße & naïve café — “quotes”!",
    "東京は日本の首都です。", "def f(x):\n    return x ** 2  # squares", "  white   space\t\n around  ",
    "🎉 emoji 👩‍👩‍👧",
    "one two three four five " * 80,
]


def main() -> None:
    folder = sys.argv[1]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.double()
    mask = batch["attention_mask"][..., None].double()
    means = (hidden * mask).sum(1) / mask.sum(1)
    cases = [{"text": text, "tokens": int(count), "norm": round(float(mean.norm()), 7),
              "first": [round(float(x), 7) for x in mean[:16]]}
             for text, count, mean in zip(TEXTS, mask.sum((1, 2)), means, strict=True)]
    path = Path(__file__).parent / "expected" / "embeddings.json"
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
