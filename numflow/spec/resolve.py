"""A spec held against a checkpoint's configuration: every parameter and option gets its value."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numflow.errors import SpecError, did_you_mean, quoted
from numflow.spec import schema
from numflow.spec.bounds import LIMITS, outside
from numflow.spec.expression import ExpressionError, Steps, evaluate
from numflow.spec.kinds import SpecOption
from numflow.spec.reader import Spec
from numflow.spec.schema import SECTIONS

_MISSING = object()
_DEEPEST = 20  # values that one value depends on, one through the other
_NOTHING = {"int": 0, "float": 0.0, "bool": False}  # what `none` means


class Resolved:
    """Values of a spec's parameters and options for one checkpoint.

    config, naming: what the checkpoint says of itself (Checkpoint.config, .naming).
    has: whether the checkpoint holds a tensor, by standard name ("output.weight"), given layer and stack.
    file: where `config` was read from, for messages.
    """

    def __init__(self, spec: Spec, config: Mapping[str, Any], naming: str,
                 has: Callable[[str, int | None, str], bool] = lambda name, layer, stack: False, file: str = ""):
        self.spec, self.config, self.naming, self.has = spec, config, naming, has
        self.file = file or ("config.json" if naming == "hf" else f"{naming} metadata")
        self._values: dict[str, tuple[Any, set[str]]] = {}
        self._open: list[str] = []
        self._found: set[str] = set()  # keys of the configuration that the value in the making comes from
        self._part = part_of(spec.section(naming).get("within", []), config)[1] or config
        self._left_out = left_out(spec, naming, config, self._part)
        alone = self._part is config or spec.section("extends_part")  # others' keys may have equal names
        self._rest = {} if alone else config
        self._steps = Steps()

    # Parameters

    def parameter(self, name: str) -> Any:
        """The value of a parameter; layer-independent.

        Raises:
            SpecError: undefined, circular, or found nowhere and without a default.
        """
        if name in self._values:
            value, found = self._values[name]
            self._found |= found
            return value
        table = self.spec.section("parameters")
        if name not in table:
            raise SpecError(f"{self.spec.path}: no parameter {name!r}{did_you_mean(name, table)}")
        before, self._found = self._found, set()
        with self._opened(f"parameters.{name}"):
            value = self._source(f"parameters.{name}", table[name], None, "")
        self._values[name] = value, self._found
        self._found = self._found | before  # a new set: what a parameter keeps does not grow
        return value

    def _whole(self, where: str, source: Any) -> int:
        """The number that a limit of a source table stands for."""
        value = self._source(where, source, None, "")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
            return int(value)
        raise self._wrong(where, f"expected a whole number, found {quoted(value)}")

    def check_limits(self) -> None:
        """Look at each parameter whose source sets limits to a value, also where nothing asks for that parameter.

        Raises:
            SpecError: the configuration has a value outside of them.
        """
        plain = Resolved(self.spec, _plain(self.config), self.naming, self.has, self.file)  # notes no key as read
        for name, source in self.spec.section("parameters").items():
            if (isinstance(source, Mapping) and any(limit in source for limit in LIMITS)
                    and plain._look_up(plain.keys(source))[0]):
                plain.parameter(name)

    @contextmanager
    def _opened(self, where: str):
        """Around what finds the value of a parameter or option, which may not need that very value."""
        if where in self._open:
            raise SpecError(f"{self.spec.path}: {where} depends on itself ({' -> '.join(self._open)[:300]})")
        if len(self._open) >= _DEEPEST:
            raise SpecError(f"{self.spec.path}: {where}: more than {_DEEPEST} values depend on one another")
        self._open.append(where)
        try:
            yield
        finally:
            self._open.pop()

    def _wrong(self, where: str, expected: str) -> SpecError:
        """Error for a bad value, with the keys and the file that it comes from."""
        keys = f" (from {', '.join(sorted(self._found))[:200]} of {self.file})" if self._found else ""
        return SpecError(f"{self.spec.path}: {where}: {expected}{keys}")

    def _source(self, where: str, source: Any, layer: int | None, stack: str, kind: str = "") -> Any:
        """A literal, an expression (text; after "=" for a "choice", never for "text"), or what a source table finds."""
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
            self._found.add(key)
            return self._mapped(where, key, source, value)
        default = source.get("default", _MISSING)
        if default is _MISSING:
            wanted = " or ".join(map(repr, keys)) or f"any key of {self.naming!r}"
            raise SpecError(f"{self.spec.path}: {where}: {self.file} has no {wanted}, and there is no default")
        return self._source(where, default, layer, stack, kind)

    def keys(self, source: Mapping[str, Any]) -> list[str]:
        """Keys under which this checkpoint's configuration may hold a value, best first."""
        keys = source.get({"hf": "config", "gguf": "gguf", "llama2c": "llama2c"}[self.naming], [])
        keys = [keys] if isinstance(keys, str) else list(keys)
        if self.naming == "gguf":
            architecture = self.config.get("general.architecture", "")
            keys = [name for key in keys for name in (f"{architecture}.{key}", key)]
        return keys

    def _look_up(self, keys: Sequence[str], nulls: bool = False) -> tuple[str, Any]:
        """The first of some keys that has a value, and that; "" and None if none has. nulls: JSON null is one.

        `rope_scaling.factor` is key "factor" of the object "rope_scaling". Any of the keys counts before what holds
        where all are left out, and that before what the part has not and the whole has.
        """
        null: set[str] = set()
        for table in (self._part, self._left_out, self._rest):
            for key in keys:
                value = _at(table, key, self.naming)
                if value is None and nulls and _at(self._rest, key, self.naming) in (None, _MISSING):
                    return key, None
                if value is None:
                    null.add(key)
                elif value is not None and value is not _MISSING and (table is not self._left_out or key not in null):
                    return key, _one_for_all(value) if self.naming == "gguf" else _numbers(value)
        return "", None

    def _mapped(self, where: str, key: str, source: Mapping[str, Any], value: Any) -> Any:
        wrong = outside(key, source, value, lambda name, text: self._whole(f"{where}.{name}", text))
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
            return evaluate(text, name, {"has": lambda tensor: self._has(tensor, layer, stack)}, self._steps)
        except ExpressionError as error:
            raise self._wrong(where, str(error)) from None

    def _has(self, tensor: Any, layer: int | None, stack: str) -> bool:
        if not isinstance(tensor, str):
            raise TypeError(f"has() takes the name of a tensor, found {quoted(tensor)}")
        self._steps.take(100)
        return self.has(tensor, layer, stack)

    # Options

    def option(self, section: str, key: str, layer: int | None = None, stack: str = "") -> Any:
        """The value of an option for a layer of a stack ("", "encoder", "decoder" or "draft"), of the option's kind.

        Raises:
            SpecError: naming the option, what was expected and what was found.
        """
        option = SECTIONS[section][key]
        value, where = option.default, f"{section}.{key}"
        for table, place in self._tables(stack):
            if key in table.get(section, {}):
                value, where = table[section][key], f"{place}{section}.{key}"
                break
        before, self._found = self._found, set()
        with self._opened(where):
            value = self._source(where, value, layer, stack, option.kind)
        if isinstance(value, (list, tuple)) and option.kind != "list" and layer is not None:
            value = self._of_layer(where, value, layer, stack)
        value = self._checked(where, option, value)
        self._found = self._found | before
        return value

    def _tables(self, stack: str):
        """Tables in which an option may be set, most specific first."""
        naming = self.spec.section(self.naming)
        if stack:
            yield naming.get(stack, {}), f"{self.naming}.{stack}."
            yield self.spec.section(stack), f"{stack}."
        yield naming, f"{self.naming}."
        yield self.spec.table, ""

    def _of_layer(self, where: str, values: list, layer: int, stack: str) -> Any:
        """The value of a layer, of a list that has one for each, and maybe for blocks that predict further tokens."""
        if layer >= len(values):
            raise self._wrong(where, f"a list of {len(values)} values, but there is a layer {layer}")
        if "further_layers" in self.spec.section("parameters") and stack != "draft":
            layers = self.option("stack", "layers", None, stack)
            if len(values) not in (layers, layers + self.parameter("further_layers")):
                raise self._wrong(where, f"a list of {len(values)} values, but there are {layers} layers")
        return values[layer]

    def keys_of(self, section: str, key: str, layer: int | None = None, stack: str = "") -> set[str]:
        """Keys of the configuration that the value of an option comes from.

        Raises:
            SpecError: as `option` does.
        """
        return self._keys(lambda: self.option(section, key, layer, stack))

    def keys_behind(self, where: str, text: str) -> set[str]:
        """Keys of the configuration that the value of an expression comes from.

        Raises:
            SpecError: as `evaluate` does.
        """
        return self._keys(lambda: self.evaluate(where, text))

    def _keys(self, value: Callable[[], Any]) -> set[str]:
        before, self._found = self._found, set()
        try:
            value()
            return self._found
        finally:
            self._found = before

    def departs(self, section: str, key: str, layer: int | None = None, stack: str = "") -> bool:
        """Whether an option has another value than where no spec sets it, and none that the configuration gives.

        Raises:
            SpecError: as `option` does.
        """
        option = SECTIONS[section][key]
        value = self.option(section, key, layer, stack)
        if self.keys_of(section, key, layer, stack):
            return False
        where = f"{section}.{key}"
        with self._opened(where):
            plain = self._source(where, option.default, layer, stack, option.kind)
        return bool(value != self._checked(where, option, plain))

    def _checked(self, where: str, option: SpecOption, value: Any) -> Any:
        """The value as one of the option's kind, within its range."""
        if option.kind == "choice":
            word = value if isinstance(value, str) else quoted(value)
            word = schema.ACTIVATION_ALIASES.get(word, word) if "silu" in option.choices else word
            if word not in option.choices:
                raise self._wrong(where, f"expected one of {', '.join(option.choices)}, found {quoted(value)}")
            return word
        if value is None and option.kind in _NOTHING:
            if option.default is None:
                return None
            value = _NOTHING[option.kind]
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
    """The first of these objects that a configuration has, by name; "": none. `a.b` is the object b in the object a."""
    for name in [names] if isinstance(names, str) else names:
        value: Any = config
        for word in name.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            return name, value
    return "", {}


def left_out(spec: Spec, naming: str, config: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec's values of keys that the part leaves out (`defaults`), by the model_type of the part or the whole."""
    tables = spec.section(naming).get("defaults", {})
    found: dict[str, Any] = {}
    for kind in (part.get("model_type"), config.get("model_type")) if tables else ():
        found |= tables.get(kind, {}) if isinstance(kind, str) else {}
    return found


def _at(table: Mapping[str, Any], key: str, naming: str) -> Any:
    """The value of a key, of JSON with objects inside, or of a flat header."""
    value: Any = table
    for word in [key] if naming == "gguf" else key.split("."):
        value = value.get(word, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _numbers(value: Any) -> Any:
    """A value of config.json, where infinities may be written as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value["__float__"]), value)
    return value


def _one_for_all(value: Any) -> Any:
    """A value of GGUF metadata, where a whole number that all layers share may be written once for each."""
    same = isinstance(value, list) and len(value) > 1 and all(type(each) is int and each == value[0] for each in value)
    return value[0] if same else value


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _as_option(word: str) -> tuple[str, str]:
    """`attention_head_dim` names the option head_dim of section attention."""
    for section, options in SECTIONS.items():
        if word.startswith(section + "_") and word[len(section) + 1:] in options:
            return section, word[len(section) + 1:]
    return "", ""
