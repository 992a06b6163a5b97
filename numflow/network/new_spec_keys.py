"""Configuration keys that a drafted spec does not read: mapped like in shipped families, or listed as unconfirmed.

An unread key may change the arithmetic, so a draft with such keys does not run. A key is mapped to the options of the
shipped families that read it, if they agree; otherwise the draft lists it in [unconfirmed]. Only keys that are known
not to affect the arithmetic are ignored.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numflow import syntax
from numflow.errors import SpecError
from numflow.spec.reader import Spec, own_tables
from numflow.spec.resolve import part_of
from numflow.spec.schema import SECTIONS

# Keys, or suffixes of keys, that do not affect the arithmetic: names, ids, training, precision, and facts that the
# tensors show (biases, sizes); with text alone, also mrope, because its position components are equal.
_INERT = frozenset("""
_attn_implementation _from_model_config _name_or_path add_bias_linear add_qkv_bias altup_coef_clip architectures
attention_bias attention_out_bias attention_softmax_in_fp32 attn_implementation attn_softmax_in_fp32 auto_map
aux_loss_alpha bias bias_dropout_fusion chunk_size chunk_size_feed_forward deterministic_flash_attn do_sample dtype
early_stopping enable_bias ep_size expand finetuning_task for_llm_compressor fp32_residual_connection fused_add_norm
gradient_checkpointing id2label init_device init_method init_std initializer_cutoff_factor initializer_factor
initializer_range input_jitter_noise is_decoder is_encoder_decoder label2id license linear_a_log_max linear_a_log_min
linear_dt_init_floor linear_dt_max linear_dt_min lm_head_bias load_balance_coeff masked_softmax_fusion max_length
min_length mlp_bias model_type moe_capacity moe_drop_tokens moe_shared_expert_overlap moe_use_aux_free mrope_interleaved
mrope_section mtp_hybrid_override_pattern mtp_layers_block_type mtp_num_hidden_layers name num_beams num_labels
num_logits_to_keep num_nextn_predict_layers output_attentions output_hidden_states output_past output_router_logits
pretraining_tp problem_type qk_head_dim qkv_bias quantization_config reorder_and_upcast_attn rescale_prenorm_residual
residual_in_fp32 return_dict router_aux_loss_coef router_jitter_noise scale_attention_softmax_in_fp32 seq_aux
slow_but_exact sparse_pred_ignore_index sparse_prediction task_specific_params time_step_floor time_step_max
time_step_rank time_step_scale tokenizer_class torch_dtype torchscript transformers_version type_vocab_size
use_associative_scan use_bias use_cache use_grouped_mm use_mambapy use_qkv_bias vocab_size vocab_size_per_layer_input
z_loss_coefficient
""".split())  # noqa: SIM905  a text is easier to read than a list here
_INERT_ENDS = ("_token_id", "_token_index", "dropout", "dropout_prob", "dropout_rate", "pdrop", "layerdrop", "_drop",
               "_bias", "_chunk_size", "_expand", "_ssm_dtype", "_cache_dtype", "_kernels", "_init_scale",
               "_init_scheme", "_xavier_init", "w_init_variance_scale")
# Suffixes of keys that describe the kinds of layers by a rule. They are redundant if a list of kinds is read.
_PATTERNS = ("_interval", "_pattern", "_every_n_layers", "full_attn_layers", "first_k_dense_replace")
_LISTS = ("layer_types", "mlp_layer_types", "kda_layers")
_INERT_STARTS = ("summary_", "classifier_", "use_flash_attn", "use_flash_attention")
# Inert keys of GGUF files, without the architecture: sizes that the tensors show.
_INERT_GGUF = frozenset(("vocab_size", "context_length", "block_count", "embedding_length", "feed_forward_length",
                         "attention.key_length", "attention.value_length", "rope.dimension_count"))


class Recorded(dict):
    """A configuration that records in `read` every key that is looked up, nested keys as "rope_scaling.factor"."""

    def __init__(self, table: Mapping[str, Any], read: set[str] | None = None, before: str = ""):
        self.read: set[str] = set() if read is None else read
        super().__init__({key: Recorded(value, self.read, f"{before}{key}.") if isinstance(value, Mapping) else value
                          for key, value in table.items()})
        self._before = before

    def get(self, key: str, default: Any = None) -> Any:
        if key in self:
            self.read.add(self._before + key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(self._before + key)
        return super().__getitem__(key)


def unread(spec: Spec, config: Mapping[str, Any], naming: str, read: set[str]) -> list[str]:
    """Keys with a value that are not in `read` and may change the arithmetic."""
    if naming == "gguf":
        before = f"{config.get('general.architecture', '')}."
        return sorted(key for key, value in _leaves(config) if key.startswith(before) and key not in read
                      and key.removeprefix(before) not in _INERT_GGUF)
    if naming != "hf":
        return []
    within = part_of(spec.section("hf").get("within", []), config)[0]
    before = f"{within}." if within else ""
    left = {key: value for key, value in _leaves(config) if key not in read and not _inert(key)
            and not (before and "." in key and not key.startswith(before))}
    values = dict(_leaves(config))
    named = _named_by(spec)  # known to the family, but not needed by any layer of this network
    listed = any(name.split(".")[-1] in _LISTS for name in read if name in values)
    for key in list(left):
        word = key.split(".")[-1]
        value = left[key]
        if isinstance(value, list) and value == value[:1] * len(value):  # the same for each layer
            value = value[0]
        again = any(word.endswith(f"_{name.split('.')[-1]}") and values.get(name) in (value, left[key])
                    for name in read)
        if key.removeprefix(before) in named or again or (listed and word.endswith(_PATTERNS)):
            del left[key]
    for keys in _alternatives(spec.table):  # the same value is read under another name
        names = [before + key if before + key in values else key for key in keys]
        read_values = [values[key] for key in names if key in read and key in values]
        for key in names:
            if key in left and left[key] in read_values:
                del left[key]
    return sorted(left)


def _named_by(spec: Spec) -> set[str]:
    """Keys of config.json that the spec's own file names as the single key of a source."""
    def names(table: Mapping[str, Any]) -> Iterable[str]:
        for key, value in table.items():
            if key == "config" and isinstance(value, str):
                yield value
            elif isinstance(value, Mapping):
                yield from names(value)

    return set(names(own_tables(spec.path)))


def _leaves(table: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        elif value is not None and value != [] and value != "":
            yield before + key, value


def _inert(key: str) -> bool:
    words = key.split(".")
    return any(word in _INERT or word.endswith(_INERT_ENDS) or word.startswith(_INERT_STARTS)
               for word in (words[0], words[-1]))


def _alternatives(table: Mapping[str, Any]) -> Iterable[list[str]]:
    """Lists of alternative keys in a spec's source tables."""
    for key, value in table.items():
        if key == "config" and isinstance(value, list):
            yield value
        elif isinstance(value, Mapping):
            yield from _alternatives(value)


@dataclass(frozen=True)
class Family:
    """A shipped spec, with the keys of config.json that its options and parameters depend on."""

    spec: Spec
    options: tuple[tuple[tuple[str, str], Any, frozenset[str]], ...]  # section and option, value, keys
    parameters: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, spec: Spec) -> "Family":
        """The family that a spec describes."""
        parameters = spec.section("parameters")
        options = tuple(((section, option), value, frozenset(_keys(value, parameters)))
                        for table in (spec.table, spec.section("hf")) for section in SECTIONS
                        for option, value in table.get(section, {}).items())
        return cls(spec, options, {name: frozenset(_keys(name, parameters)) for name in parameters})

    def settings(self, key: str) -> dict[tuple[str, str], Any]:
        """The options that depend on a key, with their values."""
        return {place: value for place, value, keys in self.options if key in keys}


def mapped(key: str, spec: Spec, families: Iterable[Family], read: set[str]) -> dict[str, dict[str, Any]] | None:
    """Tables to add to `spec` so that it reads `key` like the shipped families.

    None if no family reads the key, families differ, or `spec` already sets the option.
    """
    found: dict[str, tuple[dict, Family]] = {}
    for family in families:
        settings = family.settings(key) if family.spec.type == spec.type else {}
        if settings:
            found.setdefault(repr(sorted(settings.items(), key=repr)), (settings, family))
    if len(found) != 1:
        return None
    settings, family = next(iter(found.values()))
    added: dict[str, dict[str, Any]] = defaultdict(dict)
    ours, theirs = spec.section("parameters"), family.spec.section("parameters")
    for (section, option), value in settings.items():
        old = spec.section("hf").get(section, {}).get(option, spec.section(section).get(option))
        fixed = not isinstance(old, Mapping) and not _words(old) & ours.keys()  # a literal
        if old is not None and old != value and (fixed or _keys(old, ours) & read):
            return None
        added[section][option] = value
        for name in _names(value, theirs):
            if name in ours and key in _keys(ours[name], ours):
                continue
            if name in ours and ours[name] != theirs[name]:
                return None
            if name not in ours:
                added["parameters"][name] = theirs[name]
    return dict(added)


def readings(key: str, spec: Spec, families: Iterable[Family]) -> list[dict[str, dict[str, Any]]]:
    """Tables to add to `spec` so that it reads `key`, one for each distinct way among the families.

    [] if a family defines a needed parameter differently from `spec`.
    """
    ours, found = spec.section("parameters"), []
    for family in families:
        if family.spec.type != spec.type:
            continue
        theirs, settings = family.spec.section("parameters"), family.settings(key)
        names = [name for name, keys in family.parameters.items() if key in keys]
        names += [name for value in settings.values() for name in _names(value, theirs)]
        tables: dict[str, dict[str, Any]] = defaultdict(dict)
        for (section, option), value in settings.items():
            tables[section][option] = _by(key, value)
        for name in names:
            if key not in family.parameters[name] and name in ours and ours[name] != theirs[name]:
                return []
            tables["parameters"][name] = _by(key, theirs[name])
        if tables and tables not in found:
            found.append(dict(tables))
    return found


def _by(key: str, value: Any) -> Any:
    """A source table reduced to the key `key`, if this is one of its alternatives; other values unchanged."""
    return {**value, "config": key} if isinstance(value, Mapping) and key in value.get("config", []) else value


def _keys(value: Any, parameters: Mapping[str, Any], seen: tuple[str, ...] = ()) -> set[str]:
    """Keys of config.json that a value of a spec depends on."""
    if isinstance(value, Mapping):
        names = value.get("config", [])
        return {names} if isinstance(names, str) else {*names}
    keys: set[str] = set()
    for name in _words(value):
        if name in parameters and name not in seen:
            keys |= _keys(parameters[name], parameters, (*seen, name))
    return keys


def _names(value: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Parameters that a value depends on, directly or indirectly."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        for name in _words(value.get("default") if isinstance(value, Mapping) else value):
            if name in parameters and name not in found:
                found.append(name)
                waiting.append(parameters[name])
    return found


def _words(value: Any) -> frozenset[str]:
    return _words_of(value) if isinstance(value, str) else frozenset()


@lru_cache(maxsize=4096)
def _words_of(text: str) -> frozenset[str]:
    """Names in an expression; cached, because families repeat expressions."""
    try:
        tree = syntax.parse(text.removeprefix("=").strip(), "eval")
    except SyntaxError:  # a word of a choice, or other text
        return frozenset()
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def with_tables(spec: Spec, added: Mapping[str, Mapping[str, Any]]) -> Spec:
    """The spec with options and parameters added; they also replace options of [hf]."""
    table = dict(spec.table)
    naming = dict(spec.section("hf"))
    for section, values in added.items():
        table[section] = {**table.get(section, {}), **values}
        if section in naming:
            naming[section] = {**naming[section], **values}
    return Spec(spec.name, spec.chain, {**table, "hf": naming})


def check_confirmed(spec: Spec) -> None:
    """Refuse a draft whose [unconfirmed] still names keys.

    Raises:
        SpecError: keys are left; tells how to confirm them.
    """
    keys = spec.section("unconfirmed").get("keys", [])
    if keys:
        raise SpecError(f"{spec.path}: {to_confirm(keys)}")


def to_confirm(keys: list[str]) -> str:
    """Message about keys of the configuration that a drafted spec does not read."""
    shown = ", ".join(keys[:12]) + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")
    return (f"keys of the model's configuration that the spec does not read, and that may change what it computes: "
            f"{shown}; give an option to each that does, and take its name out of [unconfirmed] keys")
