"""Choice of the shipped spec for a checkpoint: by the architecture it names, then by conditions on its values."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from numflow.errors import SpecError, did_you_mean, quoted
from numflow.spec.reader import Spec, detect_tables, load_spec
from numflow.spec.resolve import Resolved

# What comes behind a family's name in that of an architecture. A classifier has the layers of its family.
_HEAD = re.compile(r"(ForCausalLM|ForMaskedLM|LMHeadModel|Model)$")
_CLASSIFIER = "ForSequenceClassification"

HasFor = Callable[[Spec], Callable[[str, int | None, str], bool]] | None


def detect(checkpoint: Any, has_for: HasFor = None) -> Spec:
    """The spec whose [detect] table fits the checkpoint (format, architectures or model_type, and `when`).

    has_for: gives, for a spec, the function behind `has(...)` in conditions (see network.choose_spec).

    Raises:
        SpecError: none fits, or several do.
    """
    tables = detect_tables()
    named = [load_spec(name) for name, table in tables.items() if names_it(table, checkpoint)]
    fitting = [spec for spec in named if _condition(spec, checkpoint, has_for)]
    if len(fitting) == 1:
        return fitting[0]
    what = _architecture(checkpoint)
    if len(fitting) > 1:
        raise SpecError(
            f"{checkpoint.path}: {what} fits several specs ({', '.join(s.name for s in fitting)}); "
            f"choose one with --spec"
        )
    if named:
        raise SpecError(
            f"{checkpoint.path}: {what} is known to {', '.join(s.name for s in named)}, whose condition "
            f"`when` does not hold; choose or write a spec with --spec"
        )
    known = {
        name
        for table in tables.values()
        for key in (("gguf",) if checkpoint.naming == "gguf" else ("architectures", "model_type"))
        for name in _list(table.get(key, []))
    }
    words = _identities(checkpoint)
    raise SpecError(
        f"{checkpoint.path}: no spec for {what}{did_you_mean(words[0] if words else '', known) if words else ''}; "
        f"`numflow spec new` drafts one"
    )


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
        SpecError: they are no texts.
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


def names_it(table: Mapping[str, Any], checkpoint: Any) -> bool:
    """Whether a [detect] table names the checkpoint's architecture."""
    config = checkpoint.config
    if checkpoint.naming == "gguf":
        return config.get("general.architecture") in _list(table.get("gguf", []))
    if checkpoint.naming == "llama2c":
        return bool(table.get("llama2c"))
    architectures, kind = names_in(checkpoint)
    known = _list(table.get("architectures", []))
    classified = {_HEAD.sub("", name) for name in known}
    for name in architectures:
        if name in known or (name.endswith(_CLASSIFIER) and name.removesuffix(_CLASSIFIER) in classified):
            return True
    return not architectures and kind in _list(table.get("model_type", []))


def _condition(spec: Spec, checkpoint: Any, has_for: HasFor) -> bool:
    when = spec.section("detect").get("when")
    if when is None:
        return True
    has = has_for(spec) if has_for else (lambda name, layer, stack: False)
    return bool(Resolved(spec, checkpoint.config, checkpoint.naming, has).evaluate("detect.when", when))
