"""Formats, layouts and rotations that a method says of itself, by which its checkpoints are read or refused.

A format that is not known is refused by the key and the word that name it, also where its tensors have the names and
types of another one.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numflow.errors import FormatError, quoted

if TYPE_CHECKING:
    from numflow.formats.quantised.method import Method

# Formats of a method that are read, by the key that says them; other methods have one.
_FORMATS = {"compressed-tensors": ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
                                   "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized",
                                   "mxfp8-quantized", "mixed-precision"),
            "gptq": ("gptq", "gptq_v2", "gptq_p"), "awq": ("gemm", "gemv", "gemv_fast"),
            "modelopt": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "NVFP4_AWQ",
                         "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "MXFP4", "W4A16_AWQ",
                         "W4A8_AWQ", "MIXED_PRECISION"),
            "auto-round": ("auto", "auto_round", "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptq",
                           "auto_round:awq", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2",
                           "auto_round:gptq:exllamav2", "auto_round:gptq:tritonv2", "auto_round:llm_compressor",
                           "auto_round:fp8", "auto_round:fp8_static", "auto_round:fake"),
            "bitnet": ("offline",), "mlx": ("affine", "mxfp4", "mxfp8", "nvfp4"),
            "quark": ("fp8_e4m3", "fp8_e5m2", "int8", "fp4")}
# Keys that say a layout of words, in the order in which they count.
_LAYOUTS = {"gptq": ("checkpoint_format", "format"), "awq": ("version", "checkpoint_format", "format"),
            "auto-round": ("packing_format", "backend")}
# Keys that say, where they are set, what a model does to its activations, or a layout of words; neither is read.
_NOT_READ = ("rotation", "rotation_config", "spinquant_config", "hadamard_config", "transform_config", "use_rms_norm",
             "is_marlin_format")
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
# Kinds of values that keys have, of a method or of a part of one (of weights: those of compressed-tensors).
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bits": ("a whole number from 1 to 16", lambda said: type(said) is int and 1 <= said <= 16),
    "group": ("a whole number, -1 or from 1 on", lambda said: type(said) is int and (said == -1 or said > 0)),
    "switch": ("true or false", lambda said: isinstance(said, bool)),
    "word": ("a text", lambda said: isinstance(said, str)),
    "strategy": (", ".join(_STRATEGIES), lambda said: said in _STRATEGIES),
    "number": ("int or float", lambda said: said in ("int", "float")),
    "names": ("a list of names", lambda said: isinstance(said, list) and all(isinstance(name, str) for name in said)),
    "object": ("an object", lambda said: isinstance(said, Mapping)),
    "block": ("two whole numbers from 1 on", lambda said: block_of(said) is not None)}
_KEYS = {"bits": "bits", "w_bit": "bits", "group_size": "group", "q_group_size": "group", "desc_act": "switch",
         "sym": "switch", "zero_point": "switch", "load_in_4bit": "switch", "load_in_8bit": "switch",
         "bnb_4bit_use_double_quant": "switch", "bnb_4bit_quant_type": "word", "fmt": "word", "quant_algo": "word",
         "format": "word", "checkpoint_format": "word", "weight_block_size": "block", "config_groups": "object",
         "quantized_layers": "object", "modules_to_not_convert": "names", "ignore": "names", "ignored_layers": "names",
         "exclude_modules": "names", "llm_int8_skip_modules": "names", "skip_modules": "names",
         "quant_config": "object"}
_KEYS_OF_WEIGHTS = {"num_bits": "bits", "group_size": "group", "symmetric": "switch", "strategy": "strategy",
                    "type": "number", "block_structure": "block"}
_NUMBERS_OF_ROUND = ("mx_int", "fp6", "e5m3", "_v2")  # AutoRound's data types that are not read


def layout(method: "Method") -> str:
    """The layout of GPTQ's and AWQ's words that a method says, "gptq" or "gemm" if it says none."""
    said = str(_said(method) or "").lower()
    if method.name != "auto-round":
        return said or ("gemm" if method.name == "awq" else "gptq")
    if "awq" in said:
        return "gemm"
    return "gptq" if said in ("", "auto") or ("gptq" in said and "gptqmodel" not in said) else "gptq_v2"


def _said(method: "Method") -> Any:
    keys = _LAYOUTS.get(method.name, ())
    return next((found for key in keys if (found := method.settings.get(key)) is not None), None)


def check_formats(method: "Method", folder: Path) -> None:
    """Refuse the formats of a method that are not read.

    Raises:
        FormatError: naming key and format.
    """
    for key, said, kind in _valued(method):
        wanted, fits = _KINDS[kind]
        if said is not None and not fits(said):
            raise FormatError(f"{folder}: {method}: {key}: expected {wanted}, found {quoted(said)}")
    known = _FORMATS.get(method.name, ())
    for key, said in _formats(method):
        if said is not None and known and str(said).lower() not in {name.lower() for name in known}:
            raise FormatError(f"{folder}: {method}: {key} {quoted(said)} is not read; known: {', '.join(known)}")
    for key, said in _refused(method.settings, method.name):
        raise FormatError(f"{folder}: {method}: {key} {quoted(said)} is not read")


def block_of(said: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, [128, 128] or "128x128"; None for anything else."""
    if isinstance(said, str) and len(said) < 24:
        said = [int(size) for size in said.split("x") if size.isascii() and size.isdigit()]
    if not isinstance(said, list) or len(said) != 2 or not all(type(size) is int and 0 < size < 1 << 31
                                                               for size in said):
        return None
    return said[0], said[1]


def _valued(method: "Method") -> Iterator[tuple[str, Any, str]]:
    """Keys whose values have one kind in any file, these values, and the kind."""
    settings = method.settings
    for key, kind in _KEYS.items():
        yield key, settings.get(key), kind
    if method.name == "compressed-tensors" and isinstance(groups := settings.get("config_groups"), Mapping):
        for name, group in groups.items():
            at = f"config_groups.{name}"
            yield at, group, "object"
            if isinstance(group, Mapping):
                yield f"{at}.targets", group.get("targets"), "names"
                yield f"{at}.weights", group.get("weights"), "object"
                if isinstance(weights := group.get("weights"), Mapping):
                    yield from ((f"{at}.weights.{key}", weights.get(key), kind)
                                for key, kind in _KEYS_OF_WEIGHTS.items())


def _refused(settings: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Keys and values that nothing else than a refusal fits."""
    for key in _NOT_READ:
        if said := settings.get(key):
            yield key, said if isinstance(said, str) else key
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse and sparse.get("format", "") != "dense":
        yield "sparsity_config", sparse.get("format") or "sparsity_config"
    for key in ("fmt", "format"):
        if "fnuz" in str(settings.get(key)).lower():  # another bias, no negative zero
            yield key, settings[key]
    if name == "auto-round":
        layers = settings.get("extra_config")
        for part in (settings, *(layers.values() if isinstance(layers, Mapping) else ())):
            said = str(part.get("data_type")) if isinstance(part, Mapping) else ""
            if any(word in said for word in _NUMBERS_OF_ROUND):
                yield "data_type", said
    if name == "quark":
        yield from _of_quark(settings)


def _formats(method: "Method") -> Iterator[tuple[str, Any]]:
    """Keys that say a format, and what they say."""
    settings = method.settings
    if method.name == "compressed-tensors":
        yield "format", settings.get("format")
        yield from _of_each(settings, "config_groups", "format")
    elif method.name == "modelopt":
        yield "quant_algo", settings.get("quant_algo")
        yield from _of_each(settings, "quantized_layers", "quant_algo")
    elif method.name == "auto-round":
        yield next((key for key in _LAYOUTS["auto-round"] if settings.get(key) is not None), ""), _said(method)
    elif method.name in _LAYOUTS:
        yield from ((key, settings.get(key)) for key in _LAYOUTS[method.name])
    elif method.name == "bitnet":
        yield "quantization_mode", settings.get("quantization_mode")
    elif method.name == "mlx":
        yield "mode", settings.get("mode")
        yield from ((f"{name}.mode", part.get("mode")) for name, part in settings.items() if isinstance(part, Mapping))
    elif method.name == "quark":
        yield from ((f"{key}.dtype", weight.get("dtype")) for key, weight in _weights_of_quark(settings))


def _of_each(settings: Mapping[str, Any], key: str, said: str) -> Iterator[tuple[str, Any]]:
    """The same of each part that stands under a key."""
    parts = settings.get(key)
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            yield f"{key}.{name}.{said}", part.get(said)


def _weights_of_quark(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Settings of weights, of all layers and of some, by the keys they have."""
    parts = [("global_quant_config", settings.get("global_quant_config"))]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        layers = settings.get(key)
        parts += [(f"{key}.{name}", part) for name, part in layers.items()] if isinstance(layers, Mapping) else []
    for key, part in parts:
        weight = part.get("weight") if isinstance(part, Mapping) else None
        if isinstance(weight, list):  # quantised twice
            yield from ((f"{key}.weight", each) for each in weight if isinstance(each, Mapping))
        elif isinstance(weight, Mapping):
            yield f"{key}.weight", weight


def _of_quark(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, weight in _weights_of_quark(settings):
        if weight.get("dtype") == "int8" and weight.get("qscheme") == "per_group":
            yield f"{key}.qscheme", "per_group"  # the other way round
    algorithms = settings.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        said = str(algorithm.get("name")) if isinstance(algorithm, Mapping) else ""
        if "rotat" in said or "quarot" in said:
            yield "algo_config", said
