"""Writes expected/beams.json: what transformers generates by beam search for tiny models of several families.

    python -m tests.engine.make_beams

Run it from the repository root in an environment with torch, transformers, safetensors and NumPy. The checkpoints are
those of tests/specs (weights follow from tensor names). Random models rarely end a text, so that tokens which they
generate often are declared end tokens here.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.engine.published import write_case
from tests.specs.case import load_case

# case -> keys that config.json gets
CASES = {"m2m100": {"forced_bos_token_id": 30}, "bart": {"forced_eos_token_id": 2}, "t5": {}, "nllb": {},
         "marian": {"bad_words_ids": [[202], [17, 18]]}, "mbart": {"no_repeat_ngram_size": 3}, "gpt2": {}, "qwen2": {}}
SETTINGS = [
    {"num_beams": 4}, {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 4, "length_penalty": -0.5}, {"num_beams": 5, "length_penalty": 1.5, "early_stopping": "never"},
    {"num_beams": 2, "no_repeat_ngram": 2, "min_tokens": 6}, {"num_beams": 4, "ignore_eos": True},
    {"num_beams": 6, "length_penalty": 0.0, "max_tokens": 4},
]
NAMES = {"no_repeat_ngram": "no_repeat_ngram_size", "min_tokens": "min_new_tokens"}


def run(model, ids: list[int], settings: dict, ends: list[int]) -> dict:
    """The best text of one prompt: new ids without a forced first one and the end token, and its score."""
    config = model.generation_config
    forced = config.forced_bos_token_id is not None
    options = {NAMES.get(key, key): value for key, value in settings.items() if key not in ("ignore_eos", "max_tokens")}
    if "min_new_tokens" in options:
        options["min_new_tokens"] += forced
    if settings.get("ignore_eos"):
        options["forced_eos_token_id"] = None
    prompt = torch.tensor([ids])
    result = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=settings.get("max_tokens", 12) + forced,
        eos_token_id=None if settings.get("ignore_eos") else ends, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, do_sample=False, **options)
    first = (1 if model.config.is_encoder_decoder else len(ids)) + forced
    new = result.sequences[0, first:].tolist()
    ended = not settings.get("ignore_eos") and new[-1] in ends
    return {"ids": new[:-1] if ended else new, "score": round(float(result.sequences_scores[0]), 6), "ended": ended}


def make(name: str) -> dict:
    case = load_case(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_case(name, Path(temporary), **CASES[name])
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    # What published configurations say, and not what the configuration's class assumes
    for key in ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "no_repeat_ngram_size"):
        value = CASES[name].get(key, case.configs[0].get(key))
        setattr(model.generation_config, key, value if value is not None or key != "no_repeat_ngram_size" else 0)
    model.generation_config.max_length = None
    prompts = [given["ids"] for given in case.inputs]
    free = [run(model, ids, {"num_beams": 4, "ignore_eos": True}, [])["ids"] for ids in prompts]
    ends = [id for id, _ in Counter(id for ids in free for id in ids[2:]).most_common(2)]
    if "forced_eos_token_id" in CASES[name]:
        model.generation_config.forced_eos_token_id = ends[0]
    runs = [{"prompt": i, "settings": settings, **run(model, ids, settings, ends)}
            for settings in SETTINGS for i, ids in enumerate(prompts)]
    given = CASES[name] | {"eos_token_id": ends}
    if "forced_eos_token_id" in given:
        given["forced_eos_token_id"] = ends[0]
    return {"case": name, "config": given, "runs": runs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    lines = []
    for case_name in CASES:
        made = make(case_name)
        runs = ",\n  ".join(json.dumps(found) for found in made.pop("runs"))
        lines.append(f"{json.dumps(made)[:-1]}, \"runs\": [\n  {runs}]}}")
    path = Path(__file__).parent / "expected" / "beams.json"
    path.write_text("[" + ",\n".join(lines) + "]\n", encoding="utf-8")
