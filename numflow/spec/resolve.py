"""Values of a spec's parameters and options, resolved against a checkpoint's configuration."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numflow.errors import SpecError, did_you_mean, quoted
from numflow.spec import schema
from numflow.spec.bounds import LIMITS, outside
from numflow.spec.expression import ExpressionError, Steps, evaluate
from numflow.spec.kinds import SpecOption
from numflow.spec.reader import Spec
from numflow.spec.schema import SECTIONS

_MISSING = object()
_DEEPEST = 20  # limit of nested dependencies between values
_NONE_VALUES = {"int": 0, "float": 0.0, "bool": False}  # value of `none` by kind


class Resolved:
    """Values of a spec's parameters and options for one checkpoint.

    config, naming: Checkpoint.config and Checkpoint.naming.
    has: tells whether the checkpoint has a tensor, given its standard name ("output.weight"), layer and stack.
    file: name of the file that `config` was read from, for messages.
    """

    def __init__(self, spec: Spec, config: Mapping[str, Any], naming: str,
                 has: Callable[[str, int | None, str], bool] = lambda name, layer, stack: False, file: str = ""):
        self.spec, self.config, self.naming, self.has = spec, config, naming, has
        self.file = file or ("config.json" if naming == "hf" else f"{naming} metadata")
        self._values: dict[str, tuple[Any, set[str]]] = {}
        self._options: dict[tuple[str, str, str], tuple[Any, set[str]]] = {}  # values that are the same for all layers
        self._by_layer = False  # the current value depends on the layer
        self._open: list[str] = []
        self._keys_read: set[str] = set()  # configuration keys read for the current value
        self._part = part_of(spec.section(naming).get("within", []), config)[1] or config
        self._defaults = defaults_of(spec, naming, config, self._part)
        alone = self._part is config or spec.section("extends_part")  # another model's keys may have the same names
        self._rest = {} if alone else config
        self._steps = Steps()

    # Parameters

    def parameter(self, name: str) -> Any:
        """The value of a parameter, the same for all layers.

        Raises:
            SpecError: undefined, circular, or found nowhere and without a default.
        """
        if name in self._values:
            value, found = self._values[name]
            self._keys_read |= found
            return value
        table = self.spec.section("parameters")
        if name not in table:
            raise SpecError(f"{self.spec.path}: no parameter {name!r}{did_you_mean(name, table)}")
        before, self._keys_read = self._keys_read, set()
        self._begin(f"parameters.{name}")
        try:
            value = self._source(f"parameters.{name}", table[name], None, "")
        finally:
            self._open.pop()
        self._values[name] = value, self._keys_read
        self._keys_read = self._keys_read | before  # a new set: the cached set must not grow
        return value

    def _integer(self, where: str, source: Any) -> int:
        """The integer value of a source table's limit."""
        value = self._source(where, source, None, "")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
            return int(value)
        raise self._wrong(where, f"expected a whole number, found {quoted(value)}")

    def check_limits(self) -> None:
        """Check the limits of all parameters whose source table has limits, including parameters that no option uses.

        Raises:
            SpecError: a value of the configuration is outside its limits.
        """
        copy = Resolved(self.spec, _plain(self.config), self.naming, self.has, self.file)  # marks no key as read
        for name, source in self.spec.section("parameters").items():
            if (isinstance(source, Mapping) and any(limit in source for limit in LIMITS)
                    and copy._look_up(copy.keys(source))[0]):
                copy.parameter(name)

    def _begin(self, where: str) -> None:
        """Note the evaluation of a parameter or option, until `_open.pop()`; refuses circular dependencies."""
        if where in self._open:
            raise SpecError(f"{self.spec.path}: {where} depends on itself ({' -> '.join(self._open)[:300]})")
        if len(self._open) >= _DEEPEST:
            raise SpecError(f"{self.spec.path}: {where}: more than {_DEEPEST} values depend on one another")
        self._open.append(where)

    def _wrong(self, where: str, expected: str) -> SpecError:
        """Error for a wrong value, with its configuration keys and file."""
        keys = f" (from {', '.join(sorted(self._keys_read))[:200]} of {self.file})" if self._keys_read else ""
        return SpecError(f"{self.spec.path}: {where}: {expected}{keys}")

    def _source(self, where: str, source: Any, layer: int | None, stack: str, kind: str = "") -> Any:
        """The value of a literal, an expression (for a "choice" after "=", never for "text") or a source table."""
        if isinstance(source, str):
            if kind == "text" or (kind == "choice" and not source.startswith("=")):
                return source
            return self.evaluate(where, source.removeprefix("="), layer, stack)
        if not isinstance(source, Mapping):
            return source
        keys = self.keys(source)
        key, value = self._look_up(keys, "null" in source)
        if value is None and key:
            return source["null"]
        if key:
            self._keys_read.add(key)
            return self._mapped(where, key, source, value)
        default = source.get("default", _MISSING)
        if default is _MISSING:
            wanted = " or ".join(map(repr, keys)) or f"any key of {self.naming!r}"
            raise SpecError(f"{self.spec.path}: {where}: {self.file} has no {wanted}, and there is no default")
        return self._source(where, default, layer, stack, kind)

    def keys(self, source: Mapping[str, Any]) -> list[str]:
        """Configuration keys of a source table for this checkpoint's format, first choice first."""
        keys = source.get({"hf": "config", "gguf": "gguf", "llama2c": "llama2c"}[self.naming], [])
        keys = [keys] if isinstance(keys, str) else list(keys)
        if self.naming == "gguf":
            architecture = self.config.get("general.architecture", "")
            keys = [name for key in keys for name in (f"{architecture}.{key}", key)]
        return keys

    def _look_up(self, keys: Sequence[str], nulls: bool = False) -> tuple[str, Any]:
        """The first of the keys that has a value, and the value; "" and None if no key has one.

        nulls: JSON null is a value. `rope_scaling.factor` is key "factor" of the object "rope_scaling", and
        `eos_token_id.0` the first item of a list. Order of search: the part of the configuration (`within`), the spec's
        `defaults`, the whole configuration.
        """
        null: set[str] = set()
        for table in (self._part, self._defaults, self._rest):
            for key in keys:
                value = _at(table, key, self.naming)
                if value is None and nulls and _at(self._rest, key, self.naming) in (None, _MISSING):
                    return key, None
                if value is None:
                    null.add(key)
                elif value is not None and value is not _MISSING and (table is not self._defaults or key not in null):
                    return key, _uniform(value) if self.naming == "gguf" else _numbers(value)
        return "", None

    def _mapped(self, where: str, key: str, source: Mapping[str, Any], value: Any) -> Any:
        wrong = outside(key, source, value, lambda name, text: self._integer(f"{where}.{name}", text))
        if wrong:
            raise SpecError(f"{self.spec.path}: {where}: {wrong.replace('{}', f' of {self.file}', 1)}")
        table = source.get("map")
        if table is None:
            return value
        word = value if isinstance(value, str) else quoted(value).lower()
        if word not in table:
            raise SpecError(f"{self.spec.path}: {where}: {key} of {self.file} is {quoted(value)}"
                            f"{did_you_mean(word, table)}")
        return table[word]

    def evaluate(self, where: str, text: str, layer: int | None = None, stack: str = "") -> Any:
        """The value of an expression over parameters, options and `layer`; `where` is its name in errors."""
        def name(word: str) -> Any:
            if word == "layer":
                self._by_layer = True
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
            return evaluate(text, name, {"has": lambda tensor: self._has(tensor, layer, stack)}, self._steps)
        except ExpressionError as error:
            raise self._wrong(where, str(error)) from None

    def _has(self, tensor: Any, layer: int | None, stack: str) -> bool:
        if not isinstance(tensor, str):
            raise TypeError(f"has() takes the name of a tensor, found {quoted(tensor)}")
        self._steps.take(100)
        self._by_layer = True
        return self.has(tensor, layer, stack)

    # Options

    def option(self, section: str, key: str, layer: int | None = None, stack: str = "") -> Any:
        """The value of an option for a layer of a stack ("", "encoder", "decoder" or "draft").

        Raises:
            SpecError: a value of the wrong kind or outside its range; names option, expected and found value.
        """
        if (section, key, stack) in self._options:
            value, found = self._options[section, key, stack]
            self._keys_read = self._keys_read | found
            return value
        option = SECTIONS[section][key]
        value, where = option.default, f"{section}.{key}"
        for table, prefix in self._tables(stack):
            if key in table.get(section, {}):
                value, where = table[section][key], f"{prefix}{section}.{key}"
                break
        before, self._keys_read = self._keys_read, set()
        by_layer, self._by_layer = self._by_layer, False
        self._begin(where)
        try:
            value = self._source(where, value, layer, stack, option.kind)
        finally:
            self._open.pop()
        if isinstance(value, (list, tuple)) and option.kind != "list":
            self._by_layer = True
            if layer is not None:
                value = self._of_layer(where, value, layer, stack)
        value = self._checked(where, option, value)
        if not self._by_layer:
            self._options[section, key, stack] = value, self._keys_read
        self._by_layer = self._by_layer or by_layer
        self._keys_read = self._keys_read | before
        return value

    def _tables(self, stack: str):
        """Tables that may set an option, most specific first, with the prefix of their keys."""
        naming = self.spec.section(self.naming)
        if stack:
            yield naming.get(stack, {}), f"{self.naming}.{stack}."
            yield self.spec.section(stack), f"{stack}."
        yield naming, f"{self.naming}."
        yield self.spec.table, ""

    def _of_layer(self, where: str, values: list, layer: int, stack: str) -> Any:
        """A layer's value from a list with one value per layer, and maybe per MTP block."""
        if layer >= len(values):
            raise self._wrong(where, f"a list of {len(values)} values, but there is a layer {layer}")
        if "further_layers" in self.spec.section("parameters") and stack != "draft":
            layers = self.option("stack", "layers", None, stack)
            if len(values) not in (layers, layers + self.parameter("further_layers")):
                raise self._wrong(where, f"a list of {len(values)} values, but there are {layers} layers")
        return values[layer]

    def keys_of(self, section: str, key: str, layer: int | None = None, stack: str = "") -> set[str]:
        """Configuration keys that the value of an option comes from.

        Raises:
            SpecError: as in `option`.
        """
        return self._keys(lambda: self.option(section, key, layer, stack))

    def keys_behind(self, where: str, text: str) -> set[str]:
        """Configuration keys that the value of an expression comes from.

        Raises:
            SpecError: as in `evaluate`.
        """
        return self._keys(lambda: self.evaluate(where, text))

    def _keys(self, value: Callable[[], Any]) -> set[str]:
        before, self._keys_read = self._keys_read, set()
        try:
            value()
            return self._keys_read
        finally:
            self._keys_read = before

    def departs(self, section: str, key: str, layer: int | None = None, stack: str = "") -> bool:
        """Whether an option differs from its default, and its value does not come from the configuration.

        Raises:
            SpecError: as in `option`.
        """
        option = SECTIONS[section][key]
        value = self.option(section, key, layer, stack)
        if self.keys_of(section, key, layer, stack):
            return False
        where = f"{section}.{key}"
        self._begin(where)
        try:
            default = self._source(where, option.default, layer, stack, option.kind)
        finally:
            self._open.pop()
        return bool(value != self._checked(where, option, default))

    def _checked(self, where: str, option: SpecOption, value: Any) -> Any:
        """The value converted to the option's kind; an error if it is outside the range."""
        if option.kind == "choice":
            word = value if isinstance(value, str) else quoted(value)
            word = schema.ACTIVATION_ALIASES.get(word, word) if "silu" in option.choices else word
            if word not in option.choices:
                raise self._wrong(where, f"expected one of {', '.join(option.choices)}, found {quoted(value)}")
            return word
        if value is None and option.kind in _NONE_VALUES:
            if option.default is None:
                return None
            value = _NONE_VALUES[option.kind]
        match option.kind:
            case "int" | "float":
                fits = isinstance(value, (int, float)) and not isinstance(value, bool) and option.holds(value)
                if option.kind == "float" and fits:
                    return float(value)
                if fits and value == int(value):
                    return int(value)
                raise self._wrong(where, f"expected {option.range}, found {quoted(value)}")
            case "bool" if isinstance(value, (int, float, list, tuple)):
                return bool(value)
            case "list" if isinstance(value, (list, tuple)):
                wrong = next((v for v in value if not isinstance(v, (int, float)) or isinstance(v, bool)
                              or not option.holds(v)), None)
                if wrong is not None:
                    raise self._wrong(where, f"expected a list of numbers, each {option.range}, found {quoted(wrong)}")
                return value
            case "list" if value is None:
                return None
            case "text" if isinstance(value, str):
                return value
        kind = {"bool": "true or false", "list": "a list of numbers"}.get(option.kind, option.kind)
        raise self._wrong(where, f"expected {kind}, found {quoted(value)}")


def part_of(names: str | Sequence[str], config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and content of the first of these objects in a configuration; "": none. `a.b`: object b in object a."""
    for name in [names] if isinstance(names, str) else names:
        value: Any = config
        for word in name.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            return name, value
    return "", {}


def defaults_of(spec: Spec, naming: str, config: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec's `defaults` for the model_type of the part or of the whole configuration."""
    tables = spec.section(naming).get("defaults", {})
    found: dict[str, Any] = {}
    for kind in (part.get("model_type"), config.get("model_type")) if tables else ():
        found |= tables.get(kind, {}) if isinstance(kind, str) else {}
    return found


def _at(table: Mapping[str, Any], key: str, naming: str) -> Any:
    """The value of a key: a path in nested JSON objects and lists, or a flat GGUF key."""
    value: Any = table
    for word in [key] if naming == "gguf" else key.split("."):
        if isinstance(value, list) and word.isdecimal() and int(word) < len(value):
            value = value[int(word)]
        else:
            value = value.get(word, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _numbers(value: Any) -> Any:
    """A value of config.json, with {"__float__": "Infinity"} converted to a float."""
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value["__float__"]), value)
    return value


def _uniform(value: Any) -> Any:
    """A value of GGUF metadata; a list that repeats one integer for every layer becomes this integer."""
    same = isinstance(value, list) and len(value) > 1 and all(type(each) is int and each == value[0] for each in value)
    return value[0] if same else value


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _as_option(word: str) -> tuple[str, str]:
    """Section and key of an option's long name: `attention_head_dim` is head_dim of section attention."""
    for section, options in SECTIONS.items():
        if word.startswith(section + "_") and word[len(section) + 1:] in options:
            return section, word[len(section) + 1:]
    return "", ""
