"""Recipe of a model's embeddings, from the files of its folder (or its specification)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError, RequestError, did_you_mean

# Pooling modes: name here -> (name in a pooling module's pooling_mode, switch in older files).
# Results of several modes are concatenated in this order.
POOLINGS = {
    "cls": ("cls", "pooling_mode_cls_token"),
    "max": ("max", "pooling_mode_max_tokens"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    "weighted_mean": ("weightedmean", "pooling_mode_weightedmean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x, "Tanh": np.tanh, "ReLU": lambda x: np.maximum(x, 0)}


@dataclass(frozen=True)
class Dense:
    """y = activation(weight x + bias): weight f32 [N, K], bias f32 [N] or None; activation is a key of ACTIVATIONS."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.weight @ x
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class EmbeddingRecipe:
    """Steps from hidden states to an embedding.

    pooling:     pooling modes (names of POOLINGS), concatenated; empty if the files name none.
    layers:      layers after the pooling: Dense or "normalize".
    max_tokens:  maximum tokens of a text, including special tokens; None: the model's context.
    limit_from:  name of the file with max_tokens.
    prompts:     texts to prepend, by name. prompt: name of the default prompt.
    pool_prompt: whether the tokens of the prompt are pooled too.
    dimensions:  sizes that embeddings may be truncated to; empty if the files name none.
    lower:       whether texts are lower-cased. strip: whether surrounding white space is removed.
    """

    pooling: tuple[str, ...] = ()
    layers: tuple[Dense | str, ...] = ()
    max_tokens: int | None = None
    limit_from: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None
    pool_prompt: bool = True
    dimensions: tuple[int, ...] = ()
    lower: bool = False
    strip: bool = False


def read_recipe(files: Mapping[str, Any], default: str = "none", config: Mapping[str, Any] | None = None,
                ) -> EmbeddingRecipe:
    """Read the recipe of a model folder.

    files:   Checkpoint.files: "modules" (modules.json) is read, else "pooling".
    default: pooling of the specification, for models without these files; "none" without one.
    config:  the model's config.json, for matryoshka_dimensions.

    Raises:
        FormatError: a file is damaged, or has invalid values.
        RequestError: a module that numflow does not support.
    """
    sizes = (config or {}).get("matryoshka_dimensions") or ()
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
        raise FormatError(f"matryoshka_dimensions of the configuration should be a list of numbers, is {sizes!r:.80}")
    return replace(_of_files(files, default), dimensions=tuple(sizes))


def _of_files(files: Mapping[str, Any], default: str) -> EmbeddingRecipe:
    if "modules" not in files:
        if "pooling" not in files:
            return EmbeddingRecipe(() if default == "none" else (default,))
        return EmbeddingRecipe(**_pooling(Path(files["pooling"])))
    path = Path(files["modules"])
    modules = _read(path, list)
    found: dict[str, Any] = {"layers": []}
    for module in modules:
        if not isinstance(module, Mapping) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise FormatError(f"{path}: should be a list of objects with type and path, has {module!r:.80}")
        kind, folder = module["type"].rpartition(".")[2], _inside(path, module["path"])
        if kind == "Pooling":
            found |= _pooling(folder / "config.json")
        elif kind == "Dense":
            found["layers"].append(_dense(folder))
        elif kind == "Normalize":
            found["layers"].append("normalize")
        elif kind not in ("Transformer", "Dropout"):
            raise RequestError(f"{path}: module {module['type']!r} is not supported; numflow has Transformer, Pooling, "
                               "Dense and Normalize")
    found["layers"] = tuple(found["layers"])
    return EmbeddingRecipe(**found, **_limits(path.parent), **_prompts(path.parent))


def _read(path: Path, kind: type) -> Any:
    from numflow.tokenizer.side_files import read_json

    content = read_json(path)
    if not isinstance(content, kind):
        raise FormatError(f"{path}: should be a JSON {'list' if kind is list else 'object'}")
    return content


def _inside(path: Path, name: str) -> Path:
    """Folder `name` next to the file `path`."""
    if not re.fullmatch(r"[\w.-]*", name) or name == "..":
        raise FormatError(f"{path}: {name!r} is not the name of a folder beside it")
    return path.parent / name


def _pooling(path: Path) -> dict[str, Any]:
    """pooling and pool_prompt of a pooling module's config.json."""
    config = _read(path, dict)
    named = config.get("pooling_mode")
    if named is not None:
        wanted = [named] if isinstance(named, str) else list(named)
        known = {mode: name for name, (mode, _) in POOLINGS.items()}
        for mode in wanted:
            if mode not in known:
                raise FormatError(f"{path}: pooling_mode {mode!r} is unknown{did_you_mean(mode, known)}")
        names = [name for name, (mode, _) in POOLINGS.items() if mode in wanted]
    else:
        switches = {switch for _, switch in POOLINGS.values()}
        unknown = [key for key, on in config.items() if key.startswith("pooling_mode_") and on and key not in switches]
        if unknown:
            raise FormatError(f"{path}: {unknown[0]} is unknown{did_you_mean(unknown[0], switches)}")
        names = [name for name, (_, switch) in POOLINGS.items() if config.get(switch, name == "mean")]
    if not names:
        raise FormatError(f"{path}: no pooling mode is switched on")
    return {"pooling": tuple(names), "pool_prompt": bool(config.get("include_prompt", True))}


def _dense(folder: Path) -> Dense:
    from numflow.formats import open_checkpoint

    path = folder / "config.json"
    config = _read(path, dict)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        hint = did_you_mean(activation, ACTIVATIONS)
        raise FormatError(f"{path}: activation_function {activation!r} is unknown{hint}")
    tensors = open_checkpoint(folder).tensors
    shape = (config.get("out_features"), config.get("in_features"))
    names = ("linear.weight", "linear.bias") if config.get("bias", True) else ("linear.weight",)
    for name, expected in zip(names, (shape, shape[:1])):
        if name not in tensors or tensors[name].shape != expected:
            found = list(tensors[name].shape) if name in tensors else "missing"
            raise FormatError(f"{folder}: {name} should be {list(expected)} as {path} says, is {found}")
    return Dense(tensors[names[0]].f32(), tensors[names[1]].f32() if len(names) > 1 else None, activation)


def stored_layers(names, width: int) -> tuple[Dense, ...]:
    """Dense layers in a checkpoint that are not part of the network (modules pooled_1 and pooled_2), in order.

    names: TensorNames of network.resolve. width: width of the hidden states.

    Raises:
        FormatError: the columns of a layer do not match the width before it.
    """
    layers: list[Dense] = []
    for module in ("pooled_1", "pooled_2"):
        if (tensor := names.find(module)) is None:
            continue
        if tensor.columns != width:
            raise FormatError(f"{names.checkpoint.path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected "
                              f"{width} columns")
        layers.append(Dense(tensor.f32().reshape(tensor.rows, width), None, "Identity"))
        width = tensor.rows
    return tuple(layers)


def _limits(folder: Path) -> dict[str, Any]:
    """max_tokens, limit_from, lower and strip of sentence_*_config.json (its name has varied)."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    if path is None:
        return {"strip": True}
    config = _read(path, dict)
    longest = config.get("max_seq_length")
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise FormatError(f"{path}: max_seq_length should be a number of tokens, is {longest!r}")
    return {"max_tokens": longest, "limit_from": path.name, "lower": bool(config.get("do_lower_case")), "strip": True}


def _prompts(folder: Path) -> dict[str, Any]:
    """prompts and prompt of config_sentence_transformers.json."""
    path = folder / "config_sentence_transformers.json"
    config = _read(path, dict) if path.is_file() else {}
    prompts, name = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise FormatError(f"{path}: prompts should be an object of names and texts")
    if name is not None and name not in prompts:
        raise FormatError(f"{path}: default_prompt_name {name!r} is none of its prompts{did_you_mean(name, prompts)}")
    return {"prompts": dict(prompts), "prompt": name}
