"""Writes cases/NAME.npz and variants/NAME.npz: results of transformers for tiny models of every family, float32 on the
CPU.

    python -m tests.specs.make_transformers_cases [NAME ...]

Run it from the repository root in an environment with torch, transformers, safetensors and NumPy (the tests need none
of them). Configurations are in configs*.py. A model is created from its configuration and saved; its weights are
replaced by those of weights.py under the names of the saved file, and it is loaded again from that file, so that names,
layouts and configuration keys are the published ones.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

from tests.specs.case import FOLDER, VARIANT_FOLDER
from tests.specs.configs import CASES
from tests.specs.configs_variants import VARIANTS
from tests.specs.weights import values

CLASSES = {"causal": transformers.AutoModelForCausalLM, "multimodal": transformers.AutoModelForImageTextToText,
           "audible": transformers.AutoModelForMultimodalLM, "musical": transformers.AutoModelForPreTraining,
           "masked": transformers.AutoModelForMaskedLM, "classifier": transformers.AutoModelForSequenceClassification,
           "hidden": transformers.AutoModel, "text": transformers.AutoModelForTextEncoding,
           "translate": transformers.AutoModelForSeq2SeqLM, "describe": transformers.AutoModelForImageTextToText}
ARGUMENTS = {"ids": "input_ids", "types": "token_type_ids", "decoder_ids": "decoder_input_ids"}
SPARE_KEYS = ("transformers_version", "_name_or_path", "id2label", "label2id", "task_specific_params")


def experts_by_index(layer, hidden_states, padding_mask=None):
    """The forward pass of NLLB-MoE's sparse layer. transformers 5.24 gives its experts a mask of zeros and ones, which
    they read as indices of experts; earlier versions gave each of the two chosen experts its gate."""
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    gates, chosen = layer.router(rows, padding_mask)[1].topk(2)
    return layer.experts(rows, chosen, gates).reshape(hidden_states.shape)


NllbMoeSparseMLP.forward = experts_by_index


def token_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    """Token ids other than special tokens."""
    return [5 + (7 * i * i + 13 * i * (seed + 1) + 31 * seed) % (vocabulary - 5) for i in range(count)]


def prompts(kind: str, vocabulary: int, options: dict) -> tuple[list[dict], list[dict]]:
    """For each prompt, the inputs and the rows of the results to store."""
    inputs, rows = [], []
    vocabulary -= 3 * (kind in ("multimodal", "audible", "musical", "describe"))  # ids of images and sounds
    for seed, count in enumerate(options.get("lengths", (9, 17))):
        given = {"ids": token_ids(count, vocabulary, seed)}
        kept = {"rows": sorted({0, count // 2, count - 2, count - 1})}
        if options.get("types"):
            given["types"] = [int(i > count // 2) for i in range(count)]
        if kind in ("translate", "describe"):
            given["decoder_ids"] = token_ids(count // 2 + 1, vocabulary, seed + 7)
            kept = {"rows": [0, count // 4, count // 2], "encoder_hidden": kept["rows"]}
        inputs.append(given)
        rows.append(kept)
    return inputs, rows


def save(kind: str, config: dict, folder: Path, options: dict) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint with the derived weights; returns names and shapes of its tensors, without kept integers."""
    extra, kept, salt = options.get("extra", {}), tuple(options.get("kept", ())), options.get("salt", "")
    (folder / "config.json").write_text(json.dumps(config))
    automatic = CLASSES[kind].from_config(transformers.AutoConfig.from_pretrained(folder))
    automatic.save_pretrained(folder)
    path = folder / "model.safetensors"
    with safe_open(path, "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} | extra  # noqa: SIM118
        shapes = published(shapes, options)
        own = {name: file.get_tensor(name) for name in shapes if name.endswith(kept)}
    made = {name: own.get(name, values(name + salt, shape)) for name, shape in shapes.items()}
    counted = {name: array for name, array in own.items() if array.dtype == np.int64}
    save_file({name: array.astype(np.float32) for name, array in made.items()} | counted, path, {"format": "pt"})
    return {name: shape for name, shape in shapes.items() if name not in counted}


def published(shapes: dict[str, tuple[int, ...]], options: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes as in published files, where transformers reads these but writes others."""
    turned, was, becomes = tuple(options.get("turned", ())), *options.get("renamed", ("", ""))
    return {name.replace(was, becomes): (shape[0], shape[2], shape[1]) if name.endswith(turned or "\n") else shape
            for name, shape in shapes.items()}


def compute(kind: str, folder: Path, options: dict, inputs: list[dict], rows: list[dict]) -> dict[str, np.ndarray]:
    """Results of the model in `folder` at the requested rows of each prompt."""
    attention = options.get("attention", "eager")
    model, report = CLASSES[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation=attention,
                                                  output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[what]:
            raise SystemExit(f"{folder}: {what} {report[what]}")
    model.eval()
    stored = model.state_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        # Some classes begin with other numbers once more.
        for name in stored.keys() & set(file.keys()):
            stored[name].copy_(file.get_tensor(name))
    part = model.get_submodule(options.get("part", ""))
    arrays = {}
    for i, (given, kept) in enumerate(zip(inputs, rows, strict=True)):
        with torch.no_grad():
            arguments = {ARGUMENTS[key]: torch.tensor([ids]) for key, ids in given.items()}
            result = part(**arguments, output_hidden_states=True)
        found = {} if kind in ("hidden", "text", "classifier") else {"logits": result.logits}
        if kind == "classifier":
            arrays[f"scores_{i}"] = result.logits[0].numpy()
        if kind in ("hidden", "masked", "text", "classifier"):
            found["hidden"] = getattr(result, "last_hidden_state", result.hidden_states[-1])
        if kind in ("translate", "describe"):
            found["encoder_hidden"] = result.encoder_last_hidden_state
        for name, value in found.items():
            arrays[f"{name}_{i}"] = value[0].numpy()[kept.get(name, kept["rows"])]
    return arrays


def make(name: str) -> None:
    """Write the results of one case or variant."""
    kind, config, options = (CASES | VARIANTS)[name]
    path = (FOLDER if name in CASES else VARIANT_FOLDER) / f"{name}.npz"
    config = json.loads(json.dumps(config))
    inputs, rows = prompts(kind, config.get("text_config", config)["vocab_size"], options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = config | options.get("asked", {})
        shapes = save(kind, asked, folder, options)
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(asked))
        arrays = compute(kind, folder, options, inputs, rows)
    saved = {key: value for key, value in saved.items() if key not in SPARE_KEYS}
    saved = saved if options.get("saved", True) else config
    about = {"configs": [config, saved], "tensors": shapes, "inputs": inputs, "rows": rows}
    about |= {key: options[key] for key in ("salt",) if key in options}
    about = np.frombuffer(json.dumps(about, separators=(",", ":")).encode(), np.uint8)
    np.savez_compressed(path, about=about, **arrays)
    spread = {key: float(value.std()) for key, value in arrays.items()}
    print(name, path.stat().st_size, spread, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    VARIANT_FOLDER.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES | VARIANTS:
        make(case)
