"""Draft of a spec for an unknown checkpoint: the nearest family, and guessed tensor names."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from numflow.errors import NumflowError
from numflow.formats.checkpoint import Checkpoint
from numflow.network.drafts.evidence import added_keys, computed, departures, strained, told
from numflow.network.new_spec_keys import Family, Recorded, mapped, readings, to_confirm, unread, with_tables
from numflow.network.steps.names import SUFFIXES, TensorNames
from numflow.ops import Network
from numflow.spec.detect import names_in, names_it
from numflow.spec.reader import Spec, list_specs
from numflow.spec.resolve import part_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class SpecDraft:
    """A spec as TOML text. problem: reason why it does not run yet, "" if it runs."""

    text: str
    problem: str


def draft(checkpoint: Checkpoint) -> SpecDraft:
    """Try every shipped family unchanged, then with tensor names guessed from names in other families.

    A family fits if its network builds: all tensors exist with the right shapes, and none is unused. Among several, the
    draft extends the best fit: fewest unread keys, usual forms of tensors, expected text values. If none fits, the
    draft extends the nearest family and lists tensors without a module. Configuration keys that the family does not
    read are mapped to options, or listed as unconfirmed; then the draft does not run until a user has confirmed them.
    """
    from numflow.network import build

    fitting: list[tuple[tuple, Spec, dict[str, str]]] = []
    failing = []
    continues = _continues(checkpoint)
    for spec in _families():
        guessed = _guessed_names(spec, checkpoint)
        for renamed in ({}, guessed) if guessed else ({},):
            candidate, config = _with_names(spec, checkpoint.naming, renamed), Recorded(checkpoint.config)
            other = (not names_it(spec.section("detect"), checkpoint)) + (spec.type != "decoder" and continues)
            rest = (len(renamed), len(spec.chain), spec.name)
            try:
                network = build(candidate, replace(checkpoint, config=config))
            except NumflowError as error:
                named = -len(_keys_read(spec, checkpoint))
                failing.append((len(_unplaced(candidate, checkpoint)), other, named, *rest, spec, renamed, str(error)))
                continue
            left = unread(candidate, checkpoint.config, checkpoint.naming, config.read)
            if checkpoint.naming == "hf":
                left = _matters(left, candidate, checkpoint)
            evidence = _evidence(candidate, checkpoint, network, config.read, len(renamed))
            fitting.append(((other, len(left), *evidence, *rest), spec, renamed))
            break
    if fitting:
        (_, spec, renamed), *further = sorted(fitting, key=lambda one: one[0])
        others = [other.name for _, other, _ in further]
        added, left = _mapped(_with_names(spec, checkpoint.naming, renamed), checkpoint)
        return SpecDraft(_text(spec, checkpoint, renamed, [], others, added, left), to_confirm(left) if left else "")
    *_, spec, renamed, problem = min(failing, key=lambda a: a[:-3])
    candidate = _with_names(spec, checkpoint.naming, renamed)
    left = unread(spec, checkpoint.config, checkpoint.naming, _keys_named(spec, checkpoint))
    return SpecDraft(_text(spec, checkpoint, renamed, _unplaced(candidate, checkpoint), [], {}, left), problem)


def _continues(checkpoint: Checkpoint) -> bool:
    """Whether the architecture name says that the model generates text."""
    names = names_in(checkpoint)[0] if checkpoint.naming == "hf" else []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _evidence(spec: Spec, checkpoint: Checkpoint, network: Network, read: set[str], renamed: int) -> tuple[int, ...]:
    """Sort key of a fitting family, most important measure first; smaller is better."""
    if checkpoint.naming != "hf":
        return strained(network, checkpoint), renamed
    return (strained(network, checkpoint), renamed, told(spec, checkpoint, read),
            -added_keys(spec, checkpoint.config), departures(spec, checkpoint))


def _mapped(spec: Spec, checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Tables that make the spec read more configuration keys, and the remaining keys."""
    added: dict[str, dict[str, Any]] = {}
    read = _keys_used(spec, checkpoint)
    for key in unread(spec, checkpoint.config, checkpoint.naming, read) if checkpoint.naming == "hf" else ():
        within = part_of(spec.section("hf").get("within", []), checkpoint.config)[0]
        tables = mapped(key.removeprefix(f"{within}."), spec, _readers(), read)
        if tables is None:
            continue
        candidate = with_tables(spec, tables)
        try:
            further = _keys_used(candidate, checkpoint)
        except NumflowError:
            continue
        if key in further and read <= further:
            spec, read = candidate, further
            for section, values in tables.items():
                added[section] = added.get(section, {}) | values
    left = unread(spec, checkpoint.config, checkpoint.naming, read)
    if left and checkpoint.naming == "hf":
        left = _matters(left, spec, checkpoint)
    return added, left


def _matters(keys: list[str], spec: Spec, checkpoint: Checkpoint) -> list[str]:
    """Keys whose reading would change the network."""
    whole = computed(spec, checkpoint) if keys else ()
    return [key for key in keys if not _says_the_same(key, spec, checkpoint, whole)]


def _says_the_same(key: str, spec: Spec, checkpoint: Checkpoint, whole: tuple) -> bool:
    """Whether the network is unchanged if the spec reads a key like any shipped family: the key is redundant, or is
    about layers that the model does not have."""
    within = part_of(spec.section("hf").get("within", []), checkpoint.config)[0]
    ways = readings(key.removeprefix(f"{within}."), spec, _readers())
    try:
        return bool(ways) and all(computed(with_tables(spec, tables), checkpoint) == whole for tables in ways)
    except NumflowError:  # tensors do not fit: the key has another meaning here
        return False


def _keys_used(spec: Spec, checkpoint: Checkpoint) -> set[str]:
    """Configuration keys that building the network reads."""
    from numflow.network import build

    config = Recorded(checkpoint.config)
    build(spec, replace(checkpoint, config=config))
    return config.read


def _keys_named(spec: Spec, checkpoint: Checkpoint) -> set[str]:
    """Keys that a spec names, as an estimate of the keys it reads, if it does not build."""
    return _keys_read(spec, checkpoint, whole=True)


@cache
def _families() -> list[Spec]:
    """Shipped specs that detection may choose."""
    return [spec for spec in list_specs() if spec.section("detect") and not spec.section("extends_part")]


@cache
def _readers() -> list[Family]:
    """Shipped specs with the configuration keys that each reads."""
    return [Family.of(spec) for spec in _families()]


def _keys_read(spec: Spec, checkpoint: Checkpoint, whole: bool = False) -> set[str]:
    """Configuration keys that the spec names. whole: complete paths of nested keys."""
    role = {"hf": "config"}.get(checkpoint.naming, checkpoint.naming)
    architecture = checkpoint.config.get("general.architecture", "")
    keys: set[str] = set()

    def visit(table):
        for key, value in table.items():
            if key == role and isinstance(value, (str, list)):
                found = [value] if isinstance(value, str) else value
                keys.update((k if whole else k.split(".")[0]) if checkpoint.naming == "hf" else f"{architecture}.{k}"
                            for k in found)
            elif isinstance(value, dict):
                visit(value)

    visit({name: table for name, table in spec.table.items() if isinstance(table, dict)})
    return keys if whole else keys & set(checkpoint.config)


def _patterns(spec: Spec, naming: str) -> dict[str, list[str]]:
    tables = {**spec.section("tensors"), **spec.section(naming).get("tensors", {})}
    return {module: [p] if isinstance(p, str) else list(p) for module, p in tables.items()}


def _guessed_names(spec: Spec, checkpoint: Checkpoint) -> dict[str, str]:
    """Module -> pattern, guessed from the last words of stored names ("attn.q_proj" is a query)."""
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
    """Stored names as patterns: "model.layers.{layer}.mlp.experts.{expert}.w1"."""
    found: Counter[str] = Counter()
    for name in checkpoint.tensors:
        for suffix in (*SUFFIXES["weight"][:2], *SUFFIXES["bias"]):
            if name.endswith(suffix):
                name = name[: -len(suffix)]
                break
        for placeholder in ("{layer}", "{expert}"):
            name = _NUMBER.sub(placeholder, name, count=1)
        found[name] += 1
    return list(found)


@cache
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
    """Stored patterns that match no name of the spec."""
    names = TensorNames(spec, checkpoint)
    covered = {
        prefix + p
        for patterns in _patterns(spec, checkpoint.naming).values()
        for p in patterns
        for prefix in names.prefixes
    }
    ignored = [p.strip("*") for p in names.ignored]
    return [p for p in _stored_patterns(checkpoint) if p not in covered and not any(i in p for i in ignored)]


def _text(spec: Spec, checkpoint: Checkpoint, renamed: dict[str, str], unplaced: list[str], others: list[str],
          added: Mapping[str, Mapping[str, Any]], left: list[str]) -> str:
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
    lines += [f'extends = "{spec.name}"', "", "[model]", f"title = {_quoted(title)}", "", "[detect]", identity]
    for section, values in sorted(added.items()):
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    if left:
        lines += ["", "# Keys of the configuration that nothing above reads. The draft does not run before this list",
                  "# is empty: find out what each does, give an option to each that matters, and take its name out.",
                  "[unconfirmed]", f"keys = [{', '.join(map(_quoted, left))}]"]
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


def _toml(value: Any) -> str:
    """A spec value in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _quoted(name)


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else " " for c in text) + '"'
