"""Supported formats and layouts of quantisation methods, by their configuration.

An unknown format is refused with its key and value, even if its tensors have the names and types of a known format.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numflow.errors import FormatError, quoted

if TYPE_CHECKING:
    from numflow.formats.quantised.method import Method

# Supported formats of a method; methods not listed have a single format.
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
# Keys of the layout of packed words, first choice first.
_LAYOUTS = {"gptq": ("checkpoint_format", "format"), "awq": ("version", "checkpoint_format", "format"),
            "auto-round": ("packing_format", "backend")}
# Keys that must not be set: transforms of activations, and an unsupported word layout.
_NOT_READ = ("rotation", "rotation_config", "spinquant_config", "hadamard_config", "transform_config", "use_rms_norm",
             "is_marlin_format")
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
# Kinds of values: text for messages, and the check.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bits": ("a whole number from 1 to 16", lambda stated: type(stated) is int and 1 <= stated <= 16),
    "group": ("a whole number, -1 or from 1 on", lambda stated: type(stated) is int and (stated == -1 or stated > 0)),
    "switch": ("true or false", lambda stated: isinstance(stated, bool)),
    "word": ("a text", lambda stated: isinstance(stated, str)),
    "strategy": (", ".join(_STRATEGIES), lambda stated: stated in _STRATEGIES),
    "number": ("int or float", lambda stated: stated in ("int", "float")),
    "names": ("a list of names",
              lambda stated: isinstance(stated, list) and all(isinstance(name, str) for name in stated)),
    "object": ("an object", lambda stated: isinstance(stated, Mapping)),
    "block": ("two whole numbers from 1 on", lambda stated: block_of(stated) is not None)}
_KEYS = {"bits": "bits", "w_bit": "bits", "group_size": "group", "q_group_size": "group", "desc_act": "switch",
         "sym": "switch", "zero_point": "switch", "load_in_4bit": "switch", "load_in_8bit": "switch",
         "bnb_4bit_use_double_quant": "switch", "bnb_4bit_quant_type": "word", "fmt": "word", "quant_algo": "word",
         "format": "word", "checkpoint_format": "word", "weight_block_size": "block", "config_groups": "object",
         "quantized_layers": "object", "modules_to_not_convert": "names", "ignore": "names", "ignored_layers": "names",
         "exclude_modules": "names", "llm_int8_skip_modules": "names", "skip_modules": "names",
         "quant_config": "object"}
_KEYS_OF_WEIGHTS = {"num_bits": "bits", "group_size": "group", "symmetric": "switch", "strategy": "strategy",
                    "type": "number", "block_structure": "block"}
_NUMBERS_OF_ROUND = ("mx_int", "fp6", "e5m3", "_v2")  # unsupported data types of AutoRound


def layout(method: "Method") -> str:
    """The layout of packed words of GPTQ and AWQ in the configuration; default "gptq" or "gemm"."""
    stated = str(_stated_layout(method) or "").lower()
    if method.name != "auto-round":
        return stated or ("gemm" if method.name == "awq" else "gptq")
    if "awq" in stated:
        return "gemm"
    return "gptq" if stated in ("", "auto") or ("gptq" in stated and "gptqmodel" not in stated) else "gptq_v2"


def _stated_layout(method: "Method") -> Any:
    keys = _LAYOUTS.get(method.name, ())
    return next((found for key in keys if (found := method.settings.get(key)) is not None), None)


def check_formats(method: "Method", folder: Path) -> None:
    """Refuse unsupported formats of a method.

    Raises:
        FormatError: names key and format.
    """
    for key, stated, kind in _valued(method):
        wanted, fits = _KINDS[kind]
        if stated is not None and not fits(stated):
            raise FormatError(f"{folder}: {method}: {key}: expected {wanted}, found {quoted(stated)}")
    known = _FORMATS.get(method.name, ())
    for key, stated in _formats(method):
        if stated is not None and known and str(stated).lower() not in {name.lower() for name in known}:
            raise FormatError(f"{folder}: {method}: {key} {quoted(stated)} is not read; known: {', '.join(known)}")
    for key, stated in _refused(method.settings, method.name):
        raise FormatError(f"{folder}: {method}: {key} {quoted(stated)} is not read")


def block_of(stated: Any) -> tuple[int, int] | None:
    """Rows and columns of a block from [128, 128] or "128x128"; None for other values."""
    if isinstance(stated, str) and len(stated) < 24:
        stated = [int(size) for size in stated.split("x") if size.isascii() and size.isdigit()]
    if not isinstance(stated, list) or len(stated) != 2 or not all(type(size) is int and 0 < size < 1 << 31
                                                               for size in stated):
        return None
    return stated[0], stated[1]


def _valued(method: "Method") -> Iterator[tuple[str, Any, str]]:
    """Keys with a fixed kind of value, their values and kinds."""
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
    """Keys and values that are not supported."""
    for key in _NOT_READ:
        if stated := settings.get(key):
            yield key, stated if isinstance(stated, str) else key
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse and sparse.get("format", "") != "dense":
        yield "sparsity_config", sparse.get("format") or "sparsity_config"
    for key in ("fmt", "format"):
        if "fnuz" in str(settings.get(key)).lower():  # FNUZ: other exponent bias, no negative zero
            yield key, settings[key]
    if name == "auto-round":
        layers = settings.get("extra_config")
        for part in (settings, *(layers.values() if isinstance(layers, Mapping) else ())):
            stated = str(part.get("data_type")) if isinstance(part, Mapping) else ""
            if any(word in stated for word in _NUMBERS_OF_ROUND):
                yield "data_type", stated
    if name == "quark":
        yield from _of_quark(settings)


def _formats(method: "Method") -> Iterator[tuple[str, Any]]:
    """Keys that name a format, and their values."""
    settings = method.settings
    if method.name == "compressed-tensors":
        yield "format", settings.get("format")
        yield from _of_each(settings, "config_groups", "format")
    elif method.name == "modelopt":
        yield "quant_algo", settings.get("quant_algo")
        yield from _of_each(settings, "quantized_layers", "quant_algo")
    elif method.name == "auto-round":
        yield next((key for key in _LAYOUTS["auto-round"] if settings.get(key) is not None), ""), _stated_layout(method)
    elif method.name in _LAYOUTS:
        yield from ((key, settings.get(key)) for key in _LAYOUTS[method.name])
    elif method.name == "bitnet":
        yield "quantization_mode", settings.get("quantization_mode")
    elif method.name == "mlx":
        yield "mode", settings.get("mode")
        yield from ((f"{name}.mode", part.get("mode")) for name, part in settings.items() if isinstance(part, Mapping))
    elif method.name == "quark":
        yield from ((f"{key}.dtype", weight.get("dtype")) for key, weight in _weights_of_quark(settings))


def _of_each(settings: Mapping[str, Any], key: str, stated: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of each object under a key."""
    parts = settings.get(key)
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            yield f"{key}.{name}.{stated}", part.get(stated)


def _weights_of_quark(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Weight settings, global and per layer, with their keys."""
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
            yield f"{key}.qscheme", "per_group"  # groups along the other axis
    algorithms = settings.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        stated = str(algorithm.get("name")) if isinstance(algorithm, Mapping) else ""
        if "rotat" in stated or "quarot" in stated:
            yield "algo_config", stated
