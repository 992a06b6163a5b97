"""The quantisation method of a checkpoint, and whether it is supported.

The method is stated in config.json (`quantization_config`, also in the object of a part of the model), in a separate
file, or only implied by tensor names. An unknown method or format is refused by name, even if tensors look plain,
because they may need a scale.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, quoted
from numflow.formats.mapped import read_json
from numflow.formats.quantised.allowed import block_of, check_formats, layout

KEYS = ("quantization_config", "compression_config")
MLX_KEY = "quantization"
# Files of older programs beside config.json, and the method if they do not name one.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Last word of a tensor name -> implied method.
ENDS = {"qweight": "gptq or awq", "qzeros": "gptq or awq", "weight_packed": "compressed-tensors",
        "weight_scale": "fp8", "weight_scale_inv": "fp8", "weight_scale_2": "modelopt", "absmax": "bitsandbytes",
        "SCB": "bitsandbytes", "W_q": "hqq", "_weight_qdata": "torchao"}
_NAMES = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "fbgemm_fp8": "FBGEMM FP8", "mxfp4": "MXFP4", "mxfp8": "MXFP8",
          "modelopt": "ModelOpt", "gptq or awq": "GPTQ or AWQ", "hqq": "HQQ", "auto-round": "AutoRound",
          "bitnet": "BitNet", "mlx": "MLX", "quark": "Quark"}
_SAME = {"compressed_tensors": "compressed-tensors", "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt",
         "modelopt_mixed": "modelopt", "auto_round": "auto-round", "autoround": "auto-round",
         "intel/auto-round": "auto-round", "metal": "mlx"}
METHODS = ("awq", "auto-round", "bitnet", "bitsandbytes", "blockwise_int8", "compressed-tensors", "fbgemm_fp8", "fp8",
           "gptq", "hqq", "mlx", "modelopt", "mxfp4", "mxfp8", "quark", "torchao", "w8a8_fp8", "w8a8_int8")


@dataclass(frozen=True)
class Method:
    """The quantisation method of a checkpoint. name: one of METHODS, or a value of ENDS. where: source of the
    statement.

    settings: the method's configuration.
    """

    name: str
    where: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stated(self) -> bool:
        """Whether a configuration states the method."""
        return bool(self.settings)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a scale block, as stated; (128, 128) without a configuration."""
        for weights in (self.settings, *self._groups()):
            for key in ("weight_block_size", "block_structure"):
                if (size := block_of(weights.get(key))) is not None:
                    return size
        return None if self.stated else (128, 128)

    def number(self, *keys: str) -> int | None:
        """The first of these settings that is an integer."""
        return next((value for key in keys if type(value := self.settings.get(key)) is int), None)

    @property
    def bits(self) -> set[int]:
        """All numbers of bits in the configuration."""
        said = [self.settings.get("bits"), self.settings.get("w_bit"), *(w.get("num_bits") for w in self._groups()),
                *(layer.get("bits") for layer in self.of_layers)]
        return {bits for bits in said if type(bits) is int}

    @property
    def of_layers(self) -> list[Mapping[str, Any]]:
        """Per-layer settings of GPTQ and AutoRound."""
        found = [self.settings.get(key) for key in ("dynamic", "extra_config")]
        return [layer for layers in found if isinstance(layers, Mapping) for layer in layers.values()
                if isinstance(layer, Mapping)]

    @property
    def dense(self) -> bool:
        """Whether compressed-tensors codes cross word boundaries: from version 0.18 of the library on."""
        version = re.match(r"(\d{1,9})\.(\d{1,9})", str(self.settings.get("version", "")))
        return version is not None and (int(version[1]), int(version[2])) >= (0, 18)

    @property
    def strategies(self) -> dict[str, set[int | None]]:
        """Strategies of scales ("channel", "group", ...) in the configuration, with their group sizes; {} if some
        layers have no stated strategy."""
        if self.name == "fbgemm_fp8":
            return {"channel": {None}}
        found: dict[str, set[int | None]] = {}
        for weights in self._groups():
            size = weights.get("group_size")
            found.setdefault(str(weights.get("strategy") or ""), set()).add(size if type(size) is int else None)
        return {} if "" in found else found

    @property
    def by_index(self) -> bool:
        """Whether all layers have activation order, with the group of each input in an index."""
        ordered = [weights.get("actorder") for weights in self._groups()]
        by_group = bool(ordered) and all(said is True or said in ("group", "dynamic") for said in ordered)
        return by_group or self.settings.get("desc_act") is True

    @property
    def layout(self) -> str:
        """The layout of GPTQ's and AWQ's words: "gptq", "gptq_v2", "gptq_p", "gemm", "gemv" or "gemv_fast"."""
        return layout(self)

    @property
    def borrows(self) -> bool:
        """Whether 1 was subtracted from packed words of zero points, so that a zero point of 0 borrows from the next
        field."""
        meta = self.settings.get("meta")
        return self.layout == "gptq" and isinstance(meta, Mapping) and "gptqmodel" in str(meta.get("quantizer")).lower()

    def _groups(self) -> Iterator[Mapping[str, Any]]:
        groups = self.settings.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
                yield group["weights"]

    def __str__(self) -> str:
        return f"{_NAMES.get(self.name, self.name)} ({self.where})"


def method_of(config: Mapping[str, Any], names: Collection[str], folder: Path) -> Method | None:
    """The quantisation method of a checkpoint, None for plain weights.

    config: content of config.json. names: tensor names. folder: folder of the files.

    Raises:
        FormatError: the method or format is not supported; names it and its source.
    """
    found = _stated(config, folder) or _beside(folder)
    if found is None:
        found = _named(names)
        if found is None or found.name != "quanto":
            return found
    name = _SAME.get(found.name.lower(), found.name.lower())
    if name not in METHODS:
        what = f"quantised by {quoted(found.name)}" if found.name else "quantised by a method that it does not name"
        raise FormatError(f"{folder}: {what} ({found.where}), which is not read; known: {', '.join(METHODS)}; take the "
                          f"model in 16 bits, or a GGUF file of it")
    method = Method(name, found.where, found.settings)
    check_formats(method, folder)
    return method


def without_method(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its quantisation keys."""
    keys = (*KEYS, MLX_KEY)
    return {key: {inner: said for inner, said in value.items() if inner not in keys}
            if isinstance(value, Mapping) else value for key, value in config.items() if key not in keys}


def _stated(config: Mapping[str, Any], folder: Path) -> Method | None:
    """The method in config.json, for the model or a part of it."""
    parts = {"": config, **{f"{key}.": part for key, part in config.items() if isinstance(part, Mapping)}}
    for prefix, part in parts.items():
        for key in KEYS:
            stated = part.get(key)
            if isinstance(stated, Mapping) and stated:
                return Method(_name(stated, key), f"{prefix}{key} of config.json", stated)
            if stated not in (None, {}):
                raise FormatError(f"{folder / 'config.json'}: {prefix}{key}: expected an object with quant_method, "
                                  f"found {quoted(stated)}")
    for prefix, part in parts.items():
        stated = part.get(MLX_KEY)
        if isinstance(stated, Mapping) and _name(stated, MLX_KEY) == "mlx":
            return Method("mlx", f"{prefix}{MLX_KEY} of config.json", stated)
    return None


def _name(stated: Mapping[str, Any], key: str) -> str:
    method = stated.get("quant_method")
    if isinstance(method, str):
        return method
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        return "bitsandbytes"
    if _is_mlx(stated):
        return "mlx"  # MLX states no method name
    return "compressed-tensors" if key == "compression_config" or "config_groups" in stated else ""


def _is_mlx(stated: Mapping[str, Any]) -> bool:
    """Whether a configuration has only bits, group_size, mode and per-layer settings."""
    return type(stated.get("bits")) is int and type(stated.get("group_size")) is int and all(
        key in ("bits", "group_size", "mode") or isinstance(said, bool | Mapping) for key, said in stated.items())


def _beside(folder: Path) -> Method | None:
    for name, usual in _FILES.items():
        if (folder / name).is_file():
            said = read_json(folder / name)
            inner = said.get("quantization")
            settings = inner if isinstance(inner, Mapping) else said
            method = said.get("quant_method", usual)
            return Method(method if isinstance(method, str) else usual, name, settings or {"quant_method": usual})
    return None


def _named(names: Collection[str]) -> Method | None:
    for name in names:
        end = name.rpartition(".")[2]
        sign = ENDS.get(end) or ("fp8" if name.endswith("_scale_inv") else None)
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in names:
            sign = "mxfp4"
        if end == "_data" and f"{name.removesuffix('_data')}_scale" in names:
            sign = "quanto"  # quanto has no entry in config.json
        if sign:
            return Method(sign, f"tensor {quoted(name)}")
    return None
