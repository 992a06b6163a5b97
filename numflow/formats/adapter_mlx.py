"""Adapters of mlx-lm: adapter_config.json with `lora_parameters`, and adapters.safetensors beside it.

NAME.lora_a and NAME.lora_b change NAME.weight [N, K] by lora_parameters.scale times their product:

    matrices     lora_a [K, r], lora_b [r, N]
    experts      NAME.switch_mlp.PART: lora_a [X, r, K], lora_b [X, N, r]
    embeddings   lora_a [V, r], lora_b [r, D]; a tied output matrix is changed too
    DoRA         NAME.m [N]: the L2 norm of each row of the sum
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, ModelNotFoundError, quoted
from numflow.formats import safetensors
from numflow.formats.adapter import Adapter, LowRank, check_floats, check_pair, turned
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show

WEIGHTS = "adapters.safetensors"
SETTINGS = "lora_parameters"
_KINDS = (None, "lora", "dora")
_PARTS = ("lora_a", "lora_b", "m")
_TABLE = re.compile(r".*embed.*|wte")  # last part of the name of an embedding table
_STACK = ".switch_mlp."


def read(folder: Path, path: Path, config: Mapping[str, Any]) -> Adapter:
    """Read the adapter in a folder. path: its configuration.

    Raises:
        ModelNotFoundError: no weights. FormatError: damaged, or an unsupported kind of adapter.
    """
    scale = _scale(path, config)
    if not (folder / WEIGHTS).is_file():
        raise ModelNotFoundError(f"{folder}: {path.name} of mlx-lm, but no {WEIGHTS} beside it")
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in safetensors.read(folder / WEIGHTS).items():
        module, _, part = name.rpartition(".")
        if part not in _PARTS:
            raise FormatError(f"{folder / WEIGHTS}: tensor {show(name)}: expected a name that ends in "
                              f"{', '.join(f'.{each}' for each in _PARTS)}")
        modules.setdefault(module, {})[part] = tensor
    if not modules:
        raise FormatError(f"{folder / WEIGHTS}: an adapter without tensors")
    added = {name: change for module, parts in modules.items()
             for name, change in _changes(f"{folder / WEIGHTS}: {show(module)}", module, parts, scale)}
    return Adapter(folder, "hf", added, head_too=any(map(_is_table, modules)))


def _scale(path: Path, config: Mapping[str, Any]) -> float:
    """The factor of the products."""
    kind, settings = config.get("fine_tune_type"), config[SETTINGS]
    if kind not in _KINDS:
        raise FormatError(f"{path}: fine_tune_type: expected 'lora' or 'dora', found {quoted(kind)}: such adapters are "
                          f"not read")
    scale = settings.get("scale") if isinstance(settings, Mapping) else None
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise FormatError(f"{path}: {SETTINGS}.scale: expected a number, found {quoted(scale)}")
    if settings.get("alpha") is not None:
        raise FormatError(f"{path}: {SETTINGS}.alpha is set: versions of mlx-lm differ in its effect; remove it, and "
                          f"set scale to scale * alpha / rank for an adapter of a version with alpha")
    return float(scale)


def _changes(where: str, module: str, parts: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, LowRank]]:
    """The changes of a module's matrix, or of each expert's matrix, by name."""
    a, b, lengths = (parts.get(part) for part in _PARTS)
    stem, stack, part = module.partition(_STACK)
    if stack:
        a, b = check_pair(where, a, b, (3,))
        if lengths is not None:
            raise FormatError(f"{where}: m: expected no magnitude of experts")
        for expert in range(a.shape[0]):
            yield f"{stem}.experts.{expert}.{part}.weight", LowRank(_of_expert(a, expert), _of_expert(b, expert), scale)
        return
    if _is_table(module):
        a, b = b, a
    else:
        a, b = (turned(each) if each is not None and len(each.shape) == 2 else each for each in (a, b))
    a, b = check_pair(where, a, b, (2,))
    check_floats(where, lengths)
    if lengths is not None and lengths.shape != b.shape[:1]:
        raise FormatError(f"{where}: m {list(lengths.shape)} should have {b.shape[0]} numbers")
    yield f"{module}.weight", LowRank(a, b, scale, lengths)


def _is_table(module: str) -> bool:
    return _TABLE.fullmatch(module.rpartition(".")[2]) is not None


def _of_expert(stack: Tensor, expert: int) -> Tensor:
    rows, columns = stack.shape[1:]
    return replace(stack, shape=(rows, columns), read=lambda: stack.raw()[expert * rows:(expert + 1) * rows])
