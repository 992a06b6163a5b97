"""transformers: tiny random checkpoints of configurations, and the results of its classes for them.

This is a separate process, so that it can have another Python environment. Each request and each answer is one line of
JSON. It needs torch and transformers, and no code of numflow.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from converted import convert

MOST_PARAMETERS = 3_000_000
GREEDY = 6
NUDGE = 3e-6  # of embeddings: what moves the logits far by it hangs on rounding


def class_of(config: dict):
    name = (config.get("architectures") or [""])[0]
    if not hasattr(transformers, name):
        raise ValueError(f"transformers has no class {name!r}")
    return getattr(transformers, name)


def keys(config: dict, folder: Path) -> dict:
    """All keys that the configuration's class has, with its own values."""
    (folder / "config.json").write_text(json.dumps(config))
    found = transformers.AutoConfig.from_pretrained(folder)
    return json.loads(json.dumps(type(found)().to_dict(), default=str))


def attention(config: dict) -> str:
    """The implementation; the plain one of Falcon adds ALiBi's biases twice."""
    return "sdpa" if config.get("model_type") == "falcon" and config.get("alibi") else "eager"


def shake(model, seed: int) -> None:
    """Weights that are far from those a class begins with, so that every part has a say."""
    random = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    buffers = [(name, value) for name, value in model.named_buffers() if name in stored and name.endswith("bias")]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    fixed = {id(module.weight) for module in model.modules() if "Sinusoidal" in type(module).__name__}
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *buffers]:
            if id(value) in fixed:
                continue
            if value.dim() > 1 and "A_log" not in name:
                spread = 1.0 if id(value) in tables else value.shape[-1] ** -0.5
                value.copy_(torch.randn(value.shape, generator=random) * spread)
            else:
                value.add_(0.6 * torch.rand(value.shape, generator=random) - 0.3)


def make(request: dict, folder: Path) -> dict:
    """Write the checkpoint and expected.npz into the folder.

    The form of a request: "shards" is several files, "half" bfloat16, "unnamed" a configuration without a class.
    """
    (folder / "config.json").write_text(json.dumps(request["config"]))
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = class_of(request["config"])
    with torch.device("meta"):
        count = sum(value.numel() for value in kind(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"too large: {count} parameters")
    config = transformers.AutoConfig.from_pretrained(folder)  # a class may change what it is made from
    torch.manual_seed(request["seed"])
    model = kind._from_config(config, attn_implementation=attention(request["config"]), dtype=torch.float32)
    shake(model, request["seed"])
    form = request.get("form", "")
    (model.bfloat16() if form == "half" else model).save_pretrained(
        folder, max_shard_size="100KB" if form == "shards" else "1GB")
    written = request["config"] if not request["saved"] else json.loads((folder / "config.json").read_text())
    if form == "half":
        written["torch_dtype" if request["seed"] % 2 else "dtype"] = "bfloat16"
    if form == "unnamed":
        written.pop("architectures", None)
    (folder / "config.json").write_text(json.dumps(written))
    model, report = kind.from_pretrained(folder, attn_implementation=attention(request["config"]), dtype=torch.float32,
                                         output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[what]:
            raise ValueError(f"what it wrote has {what} {sorted(map(str, report[what]))[:3]}")
    model.eval()
    arrays = {f"logits_{at}": compute(model, given) for at, given in enumerate(request["prompts"])}
    if not all(np.isfinite(value).all() for value in arrays.values()):
        raise ValueError("NaN")
    answer = {"greedy": [], "margin": 0.0}
    if request["greedy"]:
        answer = greedy(model, request["prompts"][-1])
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_(1 + NUDGE * torch.randn(table.shape, generator=torch.Generator().manual_seed(1)))
    moved = [error(compute(model, given), arrays[f"logits_{at}"]) for at, given in enumerate(request["prompts"])]
    np.savez(folder / "expected.npz", **arrays)
    return answer | {"moved": max(moved)}


def exact(request: dict, folder: Path) -> dict:
    """Write exact.npz: what the same weights give where every float is one of 64 bits."""
    model = class_of(request["config"]).from_pretrained(
        folder, attn_implementation=attention(request["config"]), experts_implementation="eager",
        dtype=torch.float32).eval().double()
    with in_64_bits():
        np.savez(folder / "exact.npz", **{f"logits_{at}": compute(model, given)
                                          for at, given in enumerate(request["prompts"])})
    return {}


@contextlib.contextmanager
def in_64_bits():
    """Let code that asks for float32 by name, as norms and softmaxes do, get float64."""
    names, method = {name: getattr(torch, name) for name in ("float32", "float")}, torch.Tensor.float
    try:
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = method
        for name, value in names.items():
            setattr(torch, name, value)


def compute(model, given: dict) -> np.ndarray:
    """Logits, or scores of a text, or the last hidden states of a model without a head."""
    names = {"ids": "input_ids", "decoder_ids": "decoder_input_ids"}
    cache = {} if "decoder_ids" in given else {"use_cache": False}
    with torch.no_grad():
        found = model(**{names[key]: torch.tensor([ids]) for key, ids in given.items()}, **cache)
    return (found.logits if "logits" in found else found.last_hidden_state)[0].numpy()


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / (float(wanted.std()) if wanted.size > 8 else 1.0))


def greedy(model, given: dict) -> dict:
    """Greedy tokens, each computed from the whole text, and the smallest margin between the best two logits."""
    ids, margin = list(given["ids"]), np.inf
    for _ in range(GREEDY):
        row = compute(model, {"ids": ids})[-1]
        best = np.sort(row)[-2:]
        margin = min(margin, float((best[1] - best[0]) / row.std()))
        ids.append(int(row.argmax()))
    return {"greedy": ids[-GREEDY:], "margin": margin}


def answer(request: dict) -> dict:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = {"keys": keys, "make": lambda config, folder: make(request, folder),
                     "exact": lambda config, folder: exact(request, folder),
                     "convert": lambda config, folder: convert(folder, request["converter"])}[request["do"]](
                request["config"], Path(request["folder"]))
        return {"ok": found}
    except Exception as problem:  # a class may raise anything; the error is reported and counted
        return {"refused": f"{type(problem).__name__}: {' '.join(str(problem).split())[:160]}"}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
