"""Checkpoints whose weights another program has quantised: which method made them, and that it is not read.

Such a checkpoint says so in config.json (`quantization_config`, or an object of a part of the model has it), in a file
of its own, or by nothing but the names of its tensors. Without this module it would fail for want of the plain ones,
or, worse, run with values that wait for a scale.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, quoted

_KEYS = ("quantization_config", "compression_config")
# Files beside config.json that older programs wrote, and what they stand for where they do not say it.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# The last word of a tensor's name, and what it stands for where nothing else says it.
_ENDS = {"qweight": "gptq or awq", "weight_packed": "compressed-tensors", "weight_scale": "fp8",
         "weight_scale_inv": "fp8", "absmax": "bitsandbytes", "SCB": "bitsandbytes", "qzeros": "gptq or awq"}
_NAMES = {"awq": "an AWQ", "gptq": "a GPTQ", "fp8": "an FP8", "fbgemm_fp8": "an FBGEMM FP8", "mxfp4": "an MXFP4",
          "bitsandbytes": "a bitsandbytes", "modelopt": "a ModelOpt", "gptq or awq": "a GPTQ or AWQ", "aqlm": "an AQLM",
          "hqq": "an HQQ", "eetq": "an EETQ", "auto-round": "an AutoRound"}


def check_plain(config: Mapping[str, Any], names: Iterable[str], folder: Path) -> None:
    """Refuse a checkpoint whose weights are quantised by a method that is not read.

    config: what config.json says. names: of the tensors. folder: where the files are.

    Raises:
        FormatError: naming the method, and where it stands.
    """
    found = _stated(config, folder) or _beside(folder) or _named(names)
    if found:
        method, where = found
        what = _NAMES.get(method.lower(), f"a {quoted(method)}" if method else "a quantised")
        raise FormatError(f"{folder}: {what} checkpoint ({where}), which is not read; take the model in 16 bits, or a "
                          f"GGUF file of it")


def _stated(config: Mapping[str, Any], folder: Path) -> tuple[str, str] | None:
    """The method that config.json names, for the whole model or for a part of it, and the key."""
    parts = {"": config, **{f"{key}.": part for key, part in config.items() if isinstance(part, Mapping)}}
    for prefix, part in parts.items():
        for key in _KEYS:
            stated = part.get(key)
            if isinstance(stated, Mapping) and stated:
                return _method(stated), f"{prefix}{key} of config.json"
            if stated not in (None, {}):
                raise FormatError(f"{folder / 'config.json'}: {prefix}{key}: expected an object with quant_method, "
                                  f"found {quoted(stated)}")
    return None


def _method(stated: Mapping[str, Any]) -> str:
    method = stated.get("quant_method")
    if isinstance(method, str):
        return method
    return next(("bitsandbytes" for key in ("load_in_4bit", "load_in_8bit") if stated.get(key)), "")


def _beside(folder: Path) -> tuple[str, str] | None:
    return next(((method, name) for name, method in _FILES.items() if (folder / name).is_file()), None)


def _named(names: Iterable[str]) -> tuple[str, str] | None:
    for name in names:
        end = name.rpartition(".")[2]
        if end in _ENDS:
            return _ENDS[end], f"tensor {quoted(name)}"
    return None
