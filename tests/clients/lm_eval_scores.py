"""lm-eval: log-likelihoods of a task of choices, and answers to a task of texts. Its tokenizer is the service's."""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import requests
from checks import MODEL, URL, tell

QUESTIONS = [("The capital of France is", ["Paris", "London", "Madrid"]),
             ("The opposite of hot is", ["cold", "red", "tall"]),
             ("Water is made of hydrogen and", ["oxygen", "gold", "iron"]),
             ("Café, naïve and 日本 are words; bees make", ["honey", "milk", "wine"]),
             ("The largest ocean on Earth is the", ["Pacific", "Indian", "Arctic"])]
TASKS = {"choices": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
                     "metric_list": [{"metric": "acc"}]},
         "texts": {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
                   "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
                   "metric_list": [{"metric": "exact_match"}]}}


def samples(name: str, model: str, route: str, **more) -> list[dict]:
    """What lm-eval asked and was told, of each question."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    where = Path(os.environ["HF_HOME"])
    (where / "questions.jsonl").write_text("\n".join(
        json.dumps({"question": asked, "choices": choices, "answer": 0}) for asked, choices in QUESTIONS))
    task = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}",
            "dataset_kwargs": {"data_files": {"test": str(where / "questions.jsonl")}}, **TASKS[name]}
    (where / f"{name}.yaml").write_text(json.dumps(task))
    found = simple_evaluate(model=model, model_args={"model": MODEL, "base_url": f"{URL}/v1/{route}"}, tasks=[name],
                            task_manager=TaskManager(include_path=str(where), include_defaults=False), **more)
    return found["samples"][name]


def likelihood(context: str, text: str) -> float:
    """The log-probability of a text after a context, from whole texts."""
    told = []
    for prompt in (context, context + text):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        reply = requests.post(f"{URL}/v1/completions", json=body, timeout=300)
        told.append(sum(reply.json()["choices"][0]["logprobs"]["token_logprobs"][1:]))
    return told[1] - told[0]


def harness():
    right = 0
    for sample in samples("choices", "local-completions", "completions", batch_size=4):
        sums = [reply[0][0] for reply in sample["resps"]]
        for (context, text), told in zip(sample["arguments"], sums, strict=True):
            assert abs(told - likelihood(context, text)) < 1e-3, (context, text, told)
        right += sums[0] == max(sums)
    assert right >= 3, right
    answers = samples("texts", "local-chat-completions", "chat/completions", apply_chat_template=True)
    assert len(answers) == len(QUESTIONS) and all(sample["resps"][0][0] for sample in answers)
    return "log-likelihoods, texts"


with tempfile.TemporaryDirectory() as scratch:
    os.environ["HF_HOME"] = scratch  # read when lm-eval is imported
    tell(version("lm_eval"), conversation=harness, stream=lambda: "-", tool_call_with_result=lambda: "-",
         structured_answer=lambda: "-")
