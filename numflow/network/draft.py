"""A first spec for a checkpoint that none describes: nearest family, and names for the tensors with a known part."""

import re
from collections import Counter
from dataclasses import dataclass

from numflow.errors import NumflowError
from numflow.formats.checkpoint import Checkpoint
from numflow.network.names import SUFFIXES, TensorNames
from numflow.spec.detect import names_it
from numflow.spec.reader import Spec, list_specs

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Draft:
    """A spec as TOML text. problem: what still keeps it from running, "" if it runs as it is."""

    text: str
    problem: str


def draft(checkpoint: Checkpoint) -> Draft:
    """Try every shipped family as it is, then with tensor names guessed from the names other families use.

    A family fits when its network builds: every tensor found, of the right shape, and none left over. If none fits, the
    draft extends the nearest and says which tensors have no place.
    """
    from numflow.network import build

    fitting, failing = [], []
    for spec in _families():
        for renamed in ({}, _guessed_names(spec, checkpoint)):
            candidate = _with_names(spec, checkpoint.naming, renamed)
            merit = (
                not names_it(spec.section("detect"), checkpoint),
                -len(_keys_read(spec, checkpoint)),
                len(renamed),
                len(spec.chain),
                spec.name,
            )
            try:
                build(candidate, checkpoint)
            except NumflowError as error:
                failing.append((len(_unplaced(candidate, checkpoint)), *merit, spec, renamed, str(error)))
                continue
            fitting.append((*merit, spec, renamed))
            break
    if fitting:
        *_, spec, renamed = min(fitting, key=lambda a: a[:-2])
        others = [s.name for *_, s, _ in sorted(fitting, key=lambda a: a[:-2]) if s is not spec]
        return Draft(_text(spec, checkpoint, renamed, [], others), "")
    *_, spec, renamed, problem = min(failing, key=lambda a: a[:-3])
    candidate = _with_names(spec, checkpoint.naming, renamed)
    return Draft(_text(spec, checkpoint, renamed, _unplaced(candidate, checkpoint), []), problem)


def _families() -> list[Spec]:
    """Specs that describe more than one model: those that detection may choose."""
    return [spec for spec in list_specs() if spec.section("detect")]


def _keys_read(spec: Spec, checkpoint: Checkpoint) -> set[str]:
    """Keys of the checkpoint's configuration that the spec reads."""
    role = {"hf": "config"}.get(checkpoint.naming, checkpoint.naming)
    architecture = checkpoint.config.get("general.architecture", "")
    keys: set[str] = set()

    def visit(table):
        for key, value in table.items():
            if key == role and isinstance(value, (str, list)):
                found = [value] if isinstance(value, str) else value
                keys.update(k.split(".")[0] if checkpoint.naming == "hf" else f"{architecture}.{k}" for k in found)
            elif isinstance(value, dict):
                visit(value)

    visit({name: table for name, table in spec.table.items() if isinstance(table, dict)})
    return keys & set(checkpoint.config)


def _patterns(spec: Spec, naming: str) -> dict[str, list[str]]:
    tables = {**spec.section("tensors"), **spec.section(naming).get("tensors", {})}
    return {module: [p] if isinstance(p, str) else list(p) for module, p in tables.items()}


def _guessed_names(spec: Spec, checkpoint: Checkpoint) -> dict[str, str]:
    """Module -> pattern, from the last words of stored names ("attn.q_proj" is a query wherever it stands)."""
    shapes = _stored_patterns(checkpoint)
    modules = {}
    known = _known_endings(checkpoint.naming)
    wanted = _patterns(spec, checkpoint.naming)
    for pattern in shapes:
        words = pattern.split(".")
        for count in range(min(3, len(words)), 0, -1):
            module = known.get((".".join(words[-count:]), "{layer}" in pattern))
            if module in wanted and module not in modules:
                modules[module] = pattern
                break
    return {m: p for m, p in modules.items() if not any(_matches(q, p) for q in wanted[m])}


def _matches(known: str, pattern: str) -> bool:
    return pattern == known or pattern.endswith("." + known)


def _stored_patterns(checkpoint: Checkpoint) -> list[str]:
    """Stored module names with their numbers replaced: "model.layers.{layer}.mlp.experts.{expert}.w1"."""
    found: Counter[str] = Counter()
    for name in checkpoint.tensors:
        for suffix in (*SUFFIXES["weight"][:2], *SUFFIXES["bias"]):
            if name.endswith(suffix):
                name = name[: -len(suffix)]
                break
        for place in ("{layer}", "{expert}"):
            name = _NUMBER.sub(place, name, count=1)
        found[name] += 1
    return list(found)


def _known_endings(naming: str) -> dict[tuple[str, bool], str]:
    """(last words of a pattern, whether it is per layer) -> module, where all shipped specs agree."""
    votes: dict[tuple[str, bool], set[str]] = {}
    for spec in _families():
        if spec.type != "decoder":
            continue
        for module, patterns in _patterns(spec, naming).items():
            for pattern in patterns:
                words = [w for w in pattern.split(".") if w]
                for count in range(1, min(3, len(words)) + 1):
                    votes.setdefault((".".join(words[-count:]), "{layer}" in pattern), set()).add(module)
    return {ending: modules.pop() for ending, modules in votes.items() if len(modules) == 1}


def _with_names(spec: Spec, naming: str, renamed: dict[str, str]) -> Spec:
    if not renamed:
        return spec
    section = dict(spec.section(naming))
    section["tensors"] = {**section.get("tensors", {}), **renamed}
    return Spec(spec.name, spec.chain, {**spec.table, naming: section})


def _unplaced(spec: Spec, checkpoint: Checkpoint) -> list[str]:
    """Stored patterns that no name of the spec covers."""
    names = TensorNames(spec, checkpoint)
    covered = {
        prefix + p
        for patterns in _patterns(spec, checkpoint.naming).values()
        for p in patterns
        for prefix in names.prefixes
    }
    ignored = [p.strip("*") for p in names.ignored]
    return [p for p in _stored_patterns(checkpoint) if p not in covered and not any(i in p for i in ignored)]


# Keys of a config.json that say nothing about the arithmetic.
_INERT = {
    "architectures",
    "model_type",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "use_cache",
    "initializer_range",
    "init_std",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "vocab_size",
    "pretraining_tp",
    "_name_or_path",
    "_from_model_config",
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "dropout",
    "hidden_dropout",
    "activation_dropout",
    "layerdrop",
    "attention_bias",
    "mlp_bias",
    "is_decoder",
    "id2label",
    "label2id",
    "gradient_checkpointing",
    "output_past",
    "tokenizer_class",
    "quantization_config",
}


def _unread(spec: Spec, checkpoint: Checkpoint) -> list[str]:
    if checkpoint.naming != "hf":
        return []
    return sorted(
        key
        for key in set(checkpoint.config) - _keys_read(spec, checkpoint) - _INERT
        if checkpoint.config[key] not in (None, False, [], {})
    )


def _text(spec: Spec, checkpoint: Checkpoint, renamed: dict[str, str], unplaced: list[str], others: list[str]) -> str:
    config = checkpoint.config
    if checkpoint.naming == "gguf":
        identity = f'gguf = ["{config.get("general.architecture", "unknown")}"]'
        title = config.get("general.name", checkpoint.path.stem)
    else:
        identity = "\n".join(
            f"{key} = [{', '.join(_quoted(v) for v in values)}]"
            for key, values in (
                ("architectures", config.get("architectures") or []),
                ("model_type", [config.get("model_type", "")]),
            )
            if any(values)
        )
        title = checkpoint.path.name
    lines = [f"# Drafted from {checkpoint.path.name}; the nearest shipped family is {spec.name!r}."]
    if others:
        lines.append(
            f"# The tensors alone also fit {', '.join(others)}: compare their options before you trust the draft."
        )
    unread = _unread(spec, checkpoint)
    if unread:
        lines.append(f"# Not read from config.json; make sure none of them matters: {', '.join(unread)}.")
    lines += [f'extends = "{spec.name}"', "", "[model]", f"title = {_quoted(title)}", "", "[detect]", identity]
    if renamed:
        lines += ["", f"[{checkpoint.naming}.tensors]"]
        lines += [f'"{module}" = {_quoted(pattern)}' for module, pattern in sorted(renamed.items())]
    if unplaced:
        lines += [
            "",
            "# These tensors have no place yet: name them above, or in `ignore` if the model does not need them.",
        ]
        lines += [f"#   {pattern}" for pattern in unplaced]
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else " " for c in text) + '"'
