"""PEFT adapters: adapter_config.json, and adapter_model.safetensors or adapter_model.bin beside it.

A pair NAME.lora_A.weight [r, K] and NAME.lora_B.weight [N, r] changes NAME.weight, with the factor alpha / r, or
alpha / sqrt(r) (rsLoRA). Patterns in the configuration give single modules another alpha and r. Tensors without a pair
suffix replace the base's tensor (modules_to_save, trained biases). trainable_token_indices replaces rows of a table.
With target_parameters, a pair changes a stack of experts: A has r rows per expert, B has r groups of one column per
expert. Methods beside LoRA have other tensors (adapter_kinds.py).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError, ModelNotFoundError, quoted
from numflow.formats import adapter_mlx, pickle, safetensors
from numflow.formats.adapter import (
    Adapter,
    LowRank,
    Multiplied,
    check_floats,
    check_pair,
    computed,
    invocation_of,
    turned,
)
from numflow.formats.adapter_kinds import KINDS, Module
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import read_json, show

CONFIG = "adapter_config.json"
_WEIGHTS = {"adapter_model.safetensors": safetensors.read, "adapter_model.bin": pickle.read}
_PREFIX = "base_model.model."
_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_PART = re.compile(rf"(.+)\.({'|'.join({*_LORA, *(part for kind in KINDS.values() for part in kind.parts)})})"
                   r"((?:\.\w+){0,2})")
_SHARED = _PREFIX.split(".")[0]  # module name of tensors that all modules share
_OTHER_PART = re.compile(r"lora_|trainable_tokens|\.(?:hada|lokr|vera|ia3|b?oft)_")
_COPY = re.compile(r"(.+?)(?:\.base_layer|\.token_adapter)+(\.(?:weight|bias))")
_TOKENS = re.compile(r"(.+?)(?:\.base_layer|\.token_adapter)*\.trainable_tokens_delta")
_SAVED = re.compile(r"\.(?:modules_to_save|ln_tuning_layers)\.(?:default\.)?")
_REPLACING = ("LN_TUNING", "TRAINABLE_TOKENS")  # methods that only replace norms, or rows of tables
_INNER = ".base_layer"  # nested wrappers: the first declared parameter of a module is the innermost
_TIED = ("embed_tokens", "lm_head")  # targets for which ensure_weight_tying has an effect
_DECLARED = ("gate_up_proj", "up_proj", "down_proj")  # parameters of expert stacks, in the order of declaration
# Keys that change the formula if set; such adapters are not supported.
_OTHER_KINDS = ("arrow_config", "kasa_config", "layer_replication", "monteclora_config",
                "use_bdlora", "use_qalora", "velora_config")
_INVOCATION = "alora_invocation_tokens"
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # others modify the base's weights
_YES_OR_NO = ("use_rslora", "use_dora", "ensure_weight_tying")
_BIASES = (None, "none", "all")
# Patterns come from an untrusted file, and Python's matcher may take exponential time.
_PATTERN_LENGTH, _PATTERN_REPEATS = 300, 3
_NESTED = re.compile(r"\([^()]*[*+{][^()]*\)[*+{]")


def read(folder: Path) -> Adapter:
    """Read the adapter in a folder; mlx-lm's adapters have a configuration of the same name.

    Raises:
        ModelNotFoundError: no weights. FormatError: damaged, or an unsupported kind of adapter.
    """
    config = read_json(folder / CONFIG)
    if "peft_type" not in config and adapter_mlx.SETTINGS in config:
        return adapter_mlx.read(folder, folder / CONFIG, config)
    _check_kind(folder / CONFIG, config)
    if str(config["peft_type"]).upper() == "TRAINABLE_TOKENS":
        config["trainable_token_indices"] = config.get("token_indices")
    name = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if name is None:
        raise ModelNotFoundError(f"{folder}: {CONFIG}, but neither {' nor '.join(_WEIGHTS)} beside it")
    found = _Parts(folder, name, config, _WEIGHTS[name](folder / name))
    if config.get("trainable_token_indices") and not found.tokens:
        raise FormatError(f"{folder / name}: {CONFIG} says trainable_token_indices, but there is no tensor "
                          f"...trainable_tokens_delta")
    added, multiplied = found.added()
    offsets = found.offsets(added)
    if not (added or offsets or multiplied or found.replaced or found.tokens):
        raise FormatError(f"{folder / name}: an adapter without tensors")
    invocation = () if config.get(_INVOCATION) is None else _invocation(folder / CONFIG, config, found)
    return Adapter(folder, "hf", added, offsets, found.replaced, multiplied, found.tokens, found.repeated,
                   head_too=found.ties(), invocation=invocation)


def _invocation(path: Path, config: Mapping[str, Any], found: "_Parts") -> tuple[int, ...]:
    """The tokens that start the adapter. Refuses parts that PEFT changes for tokens before them too."""
    if not all(parts.keys() <= {"lora_A", "lora_B", "lora_B.bias"} for parts in found.pairs.values()) or \
            any(len(tensor.shape) > 2 for parts in found.pairs.values() for tensor in parts.values()) or \
            found.replaced or found.tokens or config.get("target_parameters"):
        raise FormatError(f"{path}: {_INVOCATION} is set: expected pairs lora_A and lora_B of matrices alone, since "
                          f"others also change the tokens before")
    return invocation_of(f"{path}: {_INVOCATION}", config[_INVOCATION])


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse unsupported kinds and variants of adapters."""
    kind = config.get("peft_type")
    known = ("LORA", *KINDS, *_REPLACING)
    if not isinstance(kind, str) or kind.upper() not in known:
        raise FormatError(f"{path}: peft_type: expected {', '.join(known)}, found {quoted(kind)}: "
                          f"such adapters are not read")
    for key in _OTHER_KINDS:
        if config.get(key):
            raise FormatError(f"{path}: {key} is set ({quoted(config[key])}), which changes the formula of LoRA: such "
                              f"adapters are not read")
    for key in _YES_OR_NO:
        if not isinstance(config.get(key), bool | None):
            raise FormatError(f"{path}: {key}: expected true or false, found {quoted(config[key])}")
    own = f"{'lora' if kind.upper() == 'ADALORA' else kind.lower()}_only"
    if config.get("bias") not in (*_BIASES, own):
        raise FormatError(f"{path}: bias: expected 'none', 'all' or {own!r}, found {quoted(config['bias'])}")
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise FormatError(f"{path}: init_lora_weights {quoted(start)} has changed the base's weights as well: save the "
                          f"adapter as a plain LoRA first")


class _Parts:
    """The tensors of an adapter's file by module.

    pairs: module -> part ("lora_A", "lora_B.bias", "lora_embedding_A", ...) -> tensor.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]):
        self.path, self.config, self.settings = folder / name, folder / CONFIG, config
        method = str(config["peft_type"]).upper()
        self._kind = KINDS.get(method)
        self._kinds = self._kind.parts if self._kind else () if method in _REPLACING else _LORA
        self.pairs: dict[str, dict[str, Tensor]] = {}
        self.replaced: dict[str, Tensor] = {}
        self.repeated: dict[str, Tensor] = {}
        self.tokens: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._last: dict[str, np.ndarray] = {}  # the stack read last, because experts are requested one by one
        for full, tensor in tensors.items():
            self._sort(full.removeprefix(_PREFIX), tensor)

    def _sort(self, name: str, tensor: Tensor) -> None:
        if part := _PART.fullmatch(name):
            module, kind, rest = part.groups()
            if kind not in self._kinds:
                raise FormatError(f"{self.path}: tensor {show(tensor.name)}: {CONFIG} says peft_type "
                                  f"{quoted(self.settings['peft_type'])}, which has no {kind}")
            kind += ".bias" if rest.endswith(".bias") else ""
            if self.pairs.setdefault(module, {}).setdefault(kind, tensor) is not tensor:
                raise FormatError(f"{self.path}: tensor {show(tensor.name)}: there are two of {kind} of {show(module)}")
        elif copy := _COPY.fullmatch(name):
            trained = copy[2] == ".bias" and self.settings.get("bias") not in (None, "none")
            (self.replaced if trained else self.repeated)[copy[1] + copy[2]] = tensor
        elif table := _TOKENS.fullmatch(name):
            self.tokens[f"{table[1]}.weight"] = self._rows(table[1], tensor), tensor
        elif _OTHER_PART.search(name):
            raise FormatError(f"{self.path}: tensor {show(tensor.name)}: of a kind of adapter that is not read")
        elif ".original_module." not in name:
            self.replaced[_SAVED.sub(".", name)] = tensor

    def _rows(self, module: str, tensor: Tensor) -> tuple[int, ...]:
        """Indices of the replaced rows of a table."""
        said = self.settings.get("trainable_token_indices")
        if isinstance(said, Mapping):
            said = next((rows for end, rows in said.items() if f".{module}".endswith(f".{end}")), None)
        if not isinstance(said, list) or not all(type(row) is int and row >= 0 for row in said) or (
                tensor.shape[:-1] != (len(said),)):
            raise FormatError(f"{self.config}: trainable_token_indices of {show(module)}: expected "
                              f"{tensor.rows} numbers, as {show(tensor.name)} has rows, found {quoted(said)}")
        return tuple(said)

    def added(self) -> tuple[dict[str, LowRank], dict[str, Multiplied]]:
        """Low-rank changes and multiplicative factors of matrices, by name."""
        if self._kind is not None:
            made = {f"{module}.weight": change for module, parts in self.pairs.items() if module != _SHARED
                    and (change := self._kind.made(self._module(module, parts))) is not None}
            return ({name: change for name, change in made.items() if isinstance(change, LowRank)},
                    {name: change for name, change in made.items() if isinstance(change, Multiplied)})
        found = {}
        for module, parts in self.pairs.items():
            parameter, whole = self._parameter(module), module.replace(_INNER, "")
            name = f"{whole}.{parameter or 'weight'}"
            if parameter and not parts.keys() <= {"lora_A", "lora_B"}:
                raise FormatError(f"{self.path}: {show(name)}: one of target_parameters has A and B alone, found "
                                  f"{', '.join(parts)}")
            found[name] = self._pair(name if parameter else whole, parts, bool(parameter))
        return found, {}

    def _module(self, module: str, parts: Mapping[str, Tensor]) -> Module:
        def stated(key: str, patterns: str) -> Any:
            return self._stated(key, patterns, module) if patterns else self.settings.get(key)

        return Module(f"{self.path}: {show(module)}", str(self.config), parts, self.pairs.get(_SHARED, {}), stated)

    def _parameter(self, module: str) -> str:
        """The parameter of target_parameters that a pair changes; "" for none."""
        targets, whole = self.settings.get("target_parameters") or [], module.replace(_INNER, "")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise FormatError(f"{self.config}: target_parameters: expected names, found {quoted(targets)}")
        matching = {target: short for target in targets
                    if f".{whole}.{(short := target.rpartition('.')[2])}".endswith(f".{target}")}
        dotted = [short for target, short in matching.items() if "." in target]
        depth, most = module.count(_INNER), max(other.count(_INNER) for other in self.pairs
                                                if other.replace(_INNER, "") == whole)
        if most == 0 and len(dotted) == 1:
            return dotted[0]
        if most == 0 and (len(matching) < 2 or not self._more_ranks(module)):
            return next((short for target, short in matching.items() if "." in target or self._more_ranks(module)), "")
        order = [name for name in _DECLARED if name in matching.values()]
        if len(order) != len({*matching.values()}) or len(order) != most + 1:
            raise FormatError(f"{self.config}: target_parameters: which of {', '.join(sorted(matching)) or 'none'} the "
                              f"{most + 1} pairs of {show(whole)} are for is not known")
        return order[most - depth]

    def _more_ranks(self, module: str) -> bool:
        """Whether a pair's rank differs from the configuration: the pair is then for several experts."""
        a = self.pairs[module].get("lora_A")
        return a is not None and a.shape[:1] != (self._stated("r", "rank_pattern", module),)

    def ties(self) -> bool:
        """Whether a tied output matrix stays tied: only with ensure_weight_tying and such targets."""
        targets = self.settings.get("target_modules")
        if not self.settings.get("ensure_weight_tying") or not any("lora_embedding_A" in parts
                                                                   for parts in self.pairs.values()):
            return False
        if isinstance(targets, str):
            return any(self._matches(targets, name, "target_modules") for name in _TIED)
        return isinstance(targets, list) and any(str(target).rpartition(".")[2] in _TIED for target in targets)

    def offsets(self, added: Mapping[str, LowRank]) -> dict[str, tuple[Tensor, float]]:
        """Bias vectors by name of the matrix (lora_bias)."""
        found = {}
        for module, parts in self.pairs.items():
            if (bias := parts.get("lora_B.bias")) is not None:
                if len(bias.shape) != 1:
                    raise FormatError(f"{self.path}: tensor {show(bias.name)}: a bias should be a vector, is "
                                      f"{list(bias.shape)}")
                check_floats(f"{self.path}: {show(module)}", bias)
                found[f"{module}.weight"] = bias, added[f"{module}.weight"].factor
        return found

    def _pair(self, module: str, parts: Mapping[str, Tensor], parameter: bool) -> LowRank:
        """The low-rank change of a pair. module: name for patterns. parameter: whether it is one of
        target_parameters."""
        where = f"{self.path}: {show(module)}"
        table = bool({"lora_embedding_A", "lora_embedding_B"} & parts.keys())
        if table:
            a, b = check_pair(where, parts.get("lora_embedding_A"), parts.get("lora_embedding_B"), (2,))
            a, b = turned(b), turned(a)  # the table is [V, D], and A belongs to its rows
        else:
            a, b = check_pair(where, _flat(parts.get("lora_A")), _flat(parts.get("lora_B")), (2,))
        magnitude = parts.get("lora_magnitude_vector")
        check_floats(where, magnitude)
        lengths = a.shape[1] if table else b.shape[0]
        if magnitude is not None and magnitude.rows * magnitude.columns != lengths:
            raise FormatError(f"{where}: lora_magnitude_vector {list(magnitude.shape)} should have {lengths} numbers")
        if magnitude is None and self.settings.get("use_dora"):
            raise FormatError(f"{where}: {CONFIG} says use_dora, but there is no lora_magnitude_vector")
        rank = self._stated("r", "rank_pattern", module)
        if parameter and type(rank) is int and rank > 0 and a.shape[0] % rank == 0:
            return self._stack(a, b, self._factor(module, rank), a.shape[0] // rank)
        if rank is not None and rank != a.shape[0]:
            raise FormatError(f"{where}: rank {a.shape[0]}, but {CONFIG} says {quoted(rank)}")
        return LowRank(a, b, self._factor(module, a.shape[0]), magnitude, by_column=table)

    def _stack(self, a: Tensor, b: Tensor, factor: float, experts: int) -> LowRank:
        """Pairs of all experts from A [X r, K] and B [N, r X]."""
        if experts == 1:
            return LowRank(a, b, factor)
        rank, (n, _) = a.shape[0] // experts, b.shape

        def values() -> np.ndarray:
            if b.name not in self._last:
                self._last.clear()
                self._last[b.name] = b.f32().reshape(n, rank, experts).transpose(2, 0, 1)
            return self._last[b.name]

        return LowRank(replace(a, shape=(experts, rank, a.shape[1])), computed(b.name, (experts, n, rank), values),
                       factor)

    def _factor(self, module: str, rank: int) -> float:
        alpha = self._stated("lora_alpha", "alpha_pattern", module)
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise FormatError(f"{self.config}: lora_alpha of {show(module)}: expected a number, found {quoted(alpha)}")
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _stated(self, key: str, patterns: str, module: str) -> Any:
        """A number for a module: of the first pattern that matches the end of its name, else of all modules."""
        given = self.settings.get(patterns) or {}
        if not isinstance(given, Mapping):
            raise FormatError(f"{self.config}: {patterns}: expected an object, found {quoted(given)}")
        return next((value for pattern, value in given.items() if self._matches(pattern, module, patterns)),
                    self.settings.get(key))

    def _matches(self, pattern: str, module: str, key: str) -> bool:
        if module == pattern or module.endswith(f".{pattern}"):
            return True
        repeats = sum(map(pattern.count, "*+{"))
        if len(pattern) > _PATTERN_LENGTH or repeats > _PATTERN_REPEATS or _NESTED.search(pattern):
            raise FormatError(f"{self.config}: {key}: the pattern {quoted(pattern)} may take too long to match")
        try:
            return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
        except re.error as error:
            raise FormatError(f"{self.config}: {key}: {quoted(pattern)} is no regular expression: {error}") from None


def _flat(tensor: Tensor | None) -> Tensor | None:
    """A convolution kernel [N, C, ...] reshaped to a matrix [N, K]."""
    if tensor is None or len(tensor.shape) < 3:
        return tensor
    return replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))
