"""A spec held against a checkpoint's configuration: every parameter and option gets its value."""

from collections.abc import Callable, Mapping
from typing import Any

from numflow.errors import SpecError, did_you_mean
from numflow.spec import schema
from numflow.spec.expression import ExpressionError, evaluate
from numflow.spec.reader import Spec
from numflow.spec.schema import SECTIONS, Option

_MISSING = object()


class Resolved:
    """Values of a spec's parameters and options for one checkpoint.

    config, naming, architecture: what the checkpoint says of itself (Checkpoint.config, .naming).
    has: whether the checkpoint holds a tensor, by standard name ("output.weight"), given layer and stack.
    """

    def __init__(self, spec: Spec, config: Mapping[str, Any], naming: str,
                 has: Callable[[str, int | None, str], bool] = lambda name, layer, stack: False):
        self.spec, self.config, self.naming, self.has = spec, config, naming, has
        self._values: dict[str, Any] = {}
        self._open: list[str] = []

    # Parameters

    def parameter(self, name: str) -> Any:
        """The value of a parameter; layer-independent.

        Raises:
            SpecError: undefined, circular, or found nowhere and without a default.
        """
        if name in self._values:
            return self._values[name]
        table = self.spec.section("parameters")
        if name not in table:
            raise SpecError(f"{self.spec.path}: no parameter {name!r}{did_you_mean(name, table)}")
        if name in self._open:
            raise SpecError(f"{self.spec.path}: parameters.{name} depends on itself ({' -> '.join(self._open)})")
        self._open.append(name)
        try:
            value = self._source(f"parameters.{name}", table[name], None, "")
        finally:
            self._open.pop()
        self._values[name] = value
        return value

    def _source(self, where: str, source: Any, layer: int | None, stack: str, kind: str = "") -> Any:
        """A literal, an expression (text; after "=" for a "choice", never for "text"), or what a source table finds."""
        if isinstance(source, str):
            if kind == "text" or (kind == "choice" and not source.startswith("=")):
                return source
            return self.evaluate(where, source.removeprefix("="), layer, stack)
        if not isinstance(source, Mapping):
            return source
        keys = self.keys(source)
        for key in keys:
            value = self._look_up(key)
            if value is not None:
                return self._mapped(where, key, source, value)
        default = source.get("default", _MISSING)
        if default is _MISSING:
            place = "config.json" if self.naming == "hf" else f"{self.naming} metadata"
            wanted = " or ".join(map(repr, keys)) or f"any key of {self.naming!r}"
            raise SpecError(f"{self.spec.path}: {where}: {place} has no {wanted}, and there is no default")
        return self._source(where, default, layer, stack, kind)

    def keys(self, source: Mapping[str, Any]) -> list[str]:
        """Where this checkpoint's configuration may hold a value, best first."""
        keys = source.get({"hf": "config", "gguf": "gguf", "llama2c": "llama2c"}[self.naming], [])
        keys = [keys] if isinstance(keys, str) else list(keys)
        if self.naming == "gguf":
            architecture = self.config.get("general.architecture", "")
            keys = [name for key in keys for name in (f"{architecture}.{key}", key)]
        return keys

    def _look_up(self, key: str) -> Any:
        """`rope_scaling.factor` is key "factor" of the object "rope_scaling"; JSON null counts as absent."""
        if self.naming == "gguf":
            return self.config.get(key)
        part = self.config.get(self.spec.section(self.naming).get("within", ""))
        for value in (part, self.config):
            for word in key.split("."):
                value = value.get(word) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def _mapped(self, where: str, key: str, source: Mapping[str, Any], value: Any) -> Any:
        table = source.get("map")
        if table is None:
            return value
        word = value if isinstance(value, str) else str(value).lower()
        if word not in table:
            raise SpecError(f"{self.spec.path}: {where}: {key} is {value!r}{did_you_mean(word, table)}")
        return table[word]

    def evaluate(self, where: str, text: str, layer: int | None = None, stack: str = "") -> Any:
        """The value of an expression over parameters, options and `layer`; `where` names it in errors."""
        def name(word: str) -> Any:
            if word == "layer":
                if layer is None:
                    raise SpecError(f"{self.spec.path}: {where}: 'layer' has no value here")
                return layer
            if word in self.spec.section("parameters"):
                return self.parameter(word)
            section, key = _as_option(word)
            if section:
                return self.option(section, key, layer, stack)
            known = [*self.spec.section("parameters"), "layer"]
            raise SpecError(f"{self.spec.path}: {where}: {text!r} names {word!r}, which is no parameter"
                            f"{did_you_mean(word, known)}")

        try:
            return evaluate(text, name, {"has": lambda tensor: self.has(tensor, layer, stack)})
        except ExpressionError as error:
            raise SpecError(f"{self.spec.path}: {where}: {error}") from None

    # Options

    def option(self, section: str, key: str, layer: int | None = None, stack: str = "") -> Any:
        """The value of an option for a layer of a stack ("", "encoder" or "decoder"), of the option's kind.

        Raises:
            SpecError: naming the option, what was expected and what was found.
        """
        option = SECTIONS[section][key]
        value, where = option.default, f"{section}.{key}"
        for table, place in self._tables(stack):
            if key in table.get(section, {}):
                value, where = table[section][key], f"{place}{section}.{key}"
                break
        value = self._source(where, value, layer, stack, option.kind)
        if isinstance(value, (list, tuple)) and option.kind != "list" and layer is not None:
            value = self._of_layer(where, value, layer)
        return self._checked(where, option, value)

    def _tables(self, stack: str):
        """Where an option may be set, most specific first."""
        naming = self.spec.section(self.naming)
        if stack:
            yield naming.get(stack, {}), f"{self.naming}.{stack}."
            yield self.spec.section(stack), f"{stack}."
        yield naming, f"{self.naming}."
        yield self.spec.table, ""

    def _of_layer(self, where: str, values: list, layer: int) -> Any:
        if layer >= len(values):
            raise SpecError(f"{self.spec.path}: {where}: a list of {len(values)} values, but there is a layer {layer}")
        return values[layer]

    def _checked(self, where: str, option: Option, value: Any) -> Any:
        if option.kind == "choice":
            value = schema.ACTIVATION_ALIASES.get(value, value) if "silu" in option.choices else value
            if value not in option.choices:
                expected = f"one of {', '.join(option.choices)}"
                raise SpecError(f"{self.spec.path}: {where}: expected {expected}, found {value!r}")
            return value
        if value is None:
            return {"int": 0, "float": 0.0, "bool": False}.get(option.kind) if option.default is not None else None
        if option.kind == "int":
            if not isinstance(value, bool) and isinstance(value, (int, float)) and value == int(value):
                return int(value)
        elif option.kind == "float":
            if isinstance(value, (int, float)):
                return float(value)
        elif option.kind == "bool":
            return bool(value)
        elif isinstance(value, (str, list, tuple)):
            return value
        raise SpecError(f"{self.spec.path}: {where}: expected {option.kind}, found {value!r}")


def _as_option(word: str) -> tuple[str, str]:
    """`attention_head_dim` names the option head_dim of section attention."""
    for section, options in SECTIONS.items():
        if word.startswith(section + "_") and word[len(section) + 1:] in options:
            return section, word[len(section) + 1:]
    return "", ""
