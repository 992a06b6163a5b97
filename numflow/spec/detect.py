"""Choice of the shipped spec for a checkpoint: by its architecture name, then by conditions on its configuration."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from numflow.errors import SpecError, did_you_mean, quoted
from numflow.spec.paths import specs_dir
from numflow.spec.reader import Spec, detect_tables, load_spec, own_tables
from numflow.spec.resolve import Resolved, part_of

# Suffix of an architecture name behind the family's name. A classifier has the layers of its family.
_HEAD = re.compile(r"(ForCausalLM|ForMaskedLM|LMHeadModel|Model)$")
_CLASSIFIER, _BARE = "ForSequenceClassification", ("TextModel", "Model")

HasFor = Callable[[Spec], Callable[[str, int | None, str], bool]] | None


def detect(checkpoint: Any, has_for: HasFor = None) -> Spec:
    """The spec whose [detect] table fits the checkpoint (format, architectures or model_type, and `when`).

    has_for: returns a spec's function `has(...)` for conditions (see network.choose_spec).

    Raises:
        SpecError: none fits, or several do.
    """
    tables = detect_tables()
    names = [name for name, table in tables.items() if names_it(table, checkpoint)]
    if not names:
        names = [name for name, table in tables.items() if names_it(table, checkpoint, bare=True)]
        names = [name for name in names if _of_type(tables[name], checkpoint)] or names
    named = [on_parts(load_spec(name), checkpoint, has_for) for name in names]
    if named:
        return _only_one(checkpoint, _architecture(checkpoint), [(spec, spec) for spec in named], has_for)
    known = {
        name
        for table in tables.values()
        for key in (("gguf",) if checkpoint.naming == "gguf" else ("architectures", "model_type"))
        for name in _list(table.get(key, []))
    }
    words = _identities(checkpoint)
    raise SpecError(
        f"{checkpoint.path}: no spec for {_architecture(checkpoint)}"
        f"{did_you_mean(words[0] if words else '', known) if words else ''}; {_of_part(checkpoint, has_for)}"
        f"`numflow spec new` drafts one"
    )


def _only_one(checkpoint: Any, subject: str, named: list[tuple[Spec, Spec]], has_for: HasFor) -> Spec:
    """The single spec that fits, among the specs that name the checkpoint.

    named: a spec with its condition, and the spec whose values the condition reads.

    Raises:
        SpecError: no spec fits, or several do.
    """
    fitting = [stated for stated, spec in named if _condition(stated, spec, checkpoint, has_for)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(spec.name for spec in fitting or [stated for stated, _ in named])
    if fitting:
        raise SpecError(f"{checkpoint.path}: {subject} fits several specs ({names}); choose one with --spec")
    unmet = "; ".join(sorted({_unmet(stated, spec, checkpoint, has_for) for stated, spec in named}))
    raise SpecError(f"{checkpoint.path}: {subject} is detected by {names}, but the condition `when` does not hold: "
                    f"{unmet}; choose or write a spec with --spec")


def on_parts(spec: Spec, checkpoint: Any, has_for: HasFor = None) -> Spec:
    """A spec with `extends_part` on top of the spec of that part of the configuration; any other spec unchanged.

    Raises:
        SpecError: the configuration has no such part, or no spec detects it.
    """
    keys = _list(spec.section("extends_part"))
    if not keys:
        return spec
    file = checkpoint.files.get("config", checkpoint.path)
    name, part = part_of(keys, checkpoint.config)
    if checkpoint.naming != "hf" or not name:
        raise SpecError(f"{file} and spec {spec.name!r}: expected an object {' or '.join(map(repr, keys))} that "
                        f"describes the part of the model that is text")
    inner = replace(checkpoint, config=part)
    if not any(_identities(inner)):
        raise SpecError(f"{file}: {name}: expected a model_type, which names the model of this part")
    bases = [load_spec(each) for each, table in detect_tables().items() if names_it(table, inner)]
    bases = [base for base in bases if base.type == "decoder" and not base.section("extends_part")]
    if not bases:
        raise SpecError(f"{file}: {name}: no spec of a decoder for {_architecture(inner)}; "
                        f"`numflow spec new` drafts one")
    base = _only_one(checkpoint, f"{name}: {_architecture(inner)}", [
        (base, _on(spec, base, name)) for base in bases], has_for)
    return _on(spec, base, name)


def _on(spec: Spec, base: Spec, part: str) -> Spec:
    """The spec on top of `base`, reading only the object `part` of config.json. Tensor names begin with a prefix of
    `spec`, then with one of `base`."""
    merged = load_spec(spec.path, spec.enclosed, base.name)
    outer, inner = (_list(each.section("hf").get("prefix", [])) for each in (spec, base))
    prefixes = [first + second for first in outer for second in (*inner, "")]
    table = {**merged.table, "hf": {**merged.section("hf"), "within": part, "prefix": prefixes},
             "model": {**merged.section("model"), "title": f"{base.title} ({spec.title[:1].lower()}{spec.title[1:]})"}}
    return replace(merged, name=f"{spec.name} on {base.name}", table=table)


def _of_part(checkpoint: Any, has_for: HasFor) -> str:
    """Hint for a model of which only a part has a spec; "" for none."""
    for path in sorted(specs_dir().glob("*.toml")) if checkpoint.naming == "hf" else ():
        if "extends_part" in own_tables(path):
            try:
                found = on_parts(load_spec(path), checkpoint, has_for)
            except SpecError:
                continue
            return f"--spec {path.stem} runs its {found.section('hf')['within']} as {found.title}; "
    return ""


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _identities(checkpoint: Any) -> list[str]:
    if checkpoint.naming == "gguf":
        return [str(checkpoint.config.get("general.architecture", ""))]
    architectures, kind = names_in(checkpoint)
    return [*architectures, kind or ""]


def names_in(checkpoint: Any) -> tuple[list[str], str | None]:
    """Names of the model in config.json: its architectures and model_type.

    Raises:
        SpecError: they are not text.
    """
    config, where = checkpoint.config, checkpoint.files.get("config", checkpoint.path)
    architectures, kind = config.get("architectures"), config.get("model_type")
    architectures = [] if architectures is None else architectures
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise SpecError(f"{where}: architectures: expected a list of texts, found {quoted(architectures)}")
    if not isinstance(kind, str | None):
        raise SpecError(f"{where}: model_type: expected a text, found {quoted(kind)}")
    return architectures, kind


def _architecture(checkpoint: Any) -> str:
    if checkpoint.naming == "gguf":
        return f"architecture {quoted(checkpoint.config.get('general.architecture', '(none)'))}"
    if checkpoint.naming == "hf":
        names = " / ".join(filter(None, _identities(checkpoint)))
        return f"model {quoted(names)}" if names else "a checkpoint without config.json"
    return f"a {checkpoint.naming} file"


def names_it(table: Mapping[str, Any], checkpoint: Any, bare: bool = False) -> bool:
    """Whether a [detect] table names the checkpoint's architecture, or (`bare`) the architecture with a head."""
    config = checkpoint.config
    if checkpoint.naming == "gguf":
        return config.get("general.architecture") in _list(table.get("gguf", []))
    if checkpoint.naming == "llama2c":
        return bool(table.get("llama2c"))
    architectures, kind = names_in(checkpoint)
    known = _list(table.get("architectures", []))
    families = {_HEAD.sub("", name) for name in known}
    others = {family + _CLASSIFIER for family in families}
    if bare:
        others |= {family.removesuffix("ForConditionalGeneration") + other for family in families for other in _BARE}
    if any(name in known or name in others for name in architectures):
        return True
    return not architectures and kind in _list(table.get("model_type", []))


def _of_type(table: Mapping[str, Any], checkpoint: Any) -> bool:
    """Whether a [detect] table names the checkpoint's model_type."""
    return checkpoint.naming == "hf" and names_in(checkpoint)[1] in _list(table.get("model_type", []))


def _condition(stated: Spec, spec: Spec, checkpoint: Any, has_for: HasFor) -> bool:
    """Whether the condition `when` of the first spec holds for the values of the second, which may extend the first."""
    when = stated.section("detect").get("when")
    if when is None:
        return True
    return bool(_resolved(spec, checkpoint, has_for).evaluate("detect.when", when))


def _unmet(stated: Spec, spec: Spec, checkpoint: Any, has_for: HasFor) -> str:
    """The condition of a spec, with the configuration keys that it reads."""
    when = stated.section("detect")["when"]
    keys = ", ".join(sorted(_resolved(spec, checkpoint, has_for).keys_behind("detect.when", when)))
    return f"`{when}`" + (f" (from {keys})" if keys else "")


def _resolved(spec: Spec, checkpoint: Any, has_for: HasFor) -> Resolved:
    has = has_for(spec) if has_for else (lambda name, layer, stack: False)
    return Resolved(spec, checkpoint.config, checkpoint.naming, has)
