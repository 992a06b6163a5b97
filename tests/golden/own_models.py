"""Golden texts of the models that come with numflow: what every executor has to write.

    python -m tests.golden.own_models       write own_models.json anew, by the reference executor

A prompt whose best two logits ever come within MARGIN of each other is left out: rounding might turn them.
"""

import json

import numpy as np

import numflow
from tests.conftest import REPO

FILE = REPO / "tests" / "golden" / "own_models.json"
MODELS = ("tiny", "tiny-draft", "tiny-moe", "tiny-hybrid")
PROMPTS = ("Why is the sky blue?", "What is the capital of Norway?", "Who are you?", "How do birds fly?",
           "Why does it rain?", "What is a token?", "What does a duck say?")
TOKENS, MARGIN = 24, 0.05
TRANSLATED = ("The old man buys a red lamp.", "Today the small dog sleeps under the table.",
              "The cat does not find the cup.")
MASKED = ("Ada had two [MASK].", "The capital of Norway is [MASK].", "There was a little [MASK] in the garden.")


def asked(model, prompt: str) -> list[int]:
    """Ids of a prompt in the model's template."""
    return list(model.request(prompt, {"max_tokens": 1, "chat": True}).prefix)


def margin(model, ids: list[int], new: list[int]) -> float:
    """The least distance of the best two logits at the tokens that were written."""
    if not new:
        return float("inf")
    logits = np.sort(model.logits([*ids, *new[:-1]])[len(ids) - 1:], axis=1)
    return float(np.min(logits[:, -1] - logits[:, -2]))


def written() -> dict:
    """Golden texts by model."""
    found: dict = {}
    for name in MODELS:
        with numflow.load(name, backend="reference") as model:
            found[name] = []
            for prompt in PROMPTS:
                result = model.generate(prompt, max_tokens=TOKENS, chat=True, temperature=0)
                least = margin(model, asked(model, prompt), result.ids)
                if least > MARGIN and len(found[name]) < 3:
                    found[name].append({"prompt": prompt, "ids": result.ids, "text": result.text})
    with numflow.load("tiny-translator", backend="reference") as model:
        found["tiny-translator"] = [{"prompt": text, "ids": result.ids, "text": result.text}
                                    for text, result in zip(TRANSLATED, model.translate(list(TRANSLATED)))]
    with numflow.load("tiny-encoder", backend="reference") as model:
        found["tiny-encoder"] = []
        for text in MASKED:
            first, second = model.fill_mask(text, 2)[0]
            if first.probability > np.exp(MARGIN) * second.probability:
                found["tiny-encoder"].append({"prompt": text, "token": first.token, "probability": first.probability})
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
