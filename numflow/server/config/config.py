"""The service's configuration: a TOML file, overridden by options of the command line."""

import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numflow.engine.request.budget import Budget
from numflow.engine.request.settings import Settings
from numflow.errors import RequestError, did_you_mean, option
from numflow.server.config.options import MODEL, SERVICE, Option, in_config

log = logging.getLogger("numflow.server")
TABLES = ("service", "engine", "models", "prompt_templates")


@dataclass(frozen=True)
class ModelConfig:
    """One model of the service. What was not given is not in the mappings.

    load, engine: keyword arguments of numflow.load and of the engine. prompt: how requests become prompts.
    own: names of options that are this model's alone, not those of all. budget: the most that one request may ask for.
    table: the table of the file that each option is from, for those that are.
    """

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    preload: bool = False
    load: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    prompt: Mapping[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    budget: Budget = field(default_factory=Budget)
    table: Mapping[str, str] = field(default_factory=dict)

    def spell(self, name: str, value: str) -> str | None:
        """An option in a message, as the file has it; None where it is not from there."""
        return f"{self.table[name]} {in_config(name, value)}" if name in self.table else None


@dataclass(frozen=True)
class Config:
    """Everything the service is told. service: every option of options.SERVICE. models: at least one."""

    service: Mapping[str, Any]
    models: tuple[ModelConfig, ...]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["service"][name]  # not self.service: an object that is being unpickled has none yet
        except KeyError:
            raise AttributeError(name) from None

    def __post_init__(self):
        if not self.models:
            raise RequestError("no model: name one with -m, or in a [models.NAME] table of the configuration file")
        seen: set[str] = set()
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    raise RequestError(f"two models go by the name {name!r}")
                seen.add(name)


def read_config(path: Path | str) -> dict[str, Any]:
    """A configuration file's tables, for `make_config`.

    Raises:
        RequestError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {' '.join(str(error).split())}") from None


def make_config(tables: Mapping[str, Any], source: str = "configuration", service: Mapping[str, Any] | None = None,
                models: Mapping[str, Mapping[str, Any]] | None = None,
                every_model: Mapping[str, Any] | None = None) -> Config:
    """A checked configuration.

    tables:      content of a file: [service], [engine] (options of all models), [models.NAME],
                 [prompt_templates] (name = text). source: its name, for messages.
    service, every_model: options that override the file's. models: if given, they replace the file's.

    Raises:
        RequestError: an option that does not exist (with the nearest that does) or is out of range.
    """
    for name in tables:
        if name not in TABLES:
            raise RequestError(f"{source}: there is no table [{name}]{did_you_mean(name, TABLES)}")
    over, above = _read(service or {}, SERVICE), _read(every_model or {}, MODEL)
    try:
        own = _without_lenient(tables.get("service", {}), source)
        chosen = _read(own, SERVICE, "[service] ") | over
        common = _read(tables.get("engine", {}), _shared(), "[engine] ")
        found = _table(models, "") if models is not None else _table(tables.get("models", {}), "[models] ")
        templates = _templates(tables.get("prompt_templates", {}))
        made = tuple(_model(name, _table(values, f"[models.{name}] "), common, above, templates, first=not at)
                     for at, (name, values) in enumerate(found.items()))
    except RequestError as error:
        raise RequestError(f"{source}: {error}") from None
    whole = {name: option.default for name, option in SERVICE.items()} | chosen
    if whole["replicas"] and whole["slot_folder"]:
        raise RequestError(f"{source}: slot_folder is for one process, whose slots are its own: leave out replicas")
    if whole["load_adapters"]:  # also where there are none yet
        made = tuple(replace(model, load=MappingProxyType({"adapters": {}, **model.load})) for model in made)
    budget = Budget(**{limit.name: whole[limit.name] for limit in fields(Budget)})
    return Config(MappingProxyType(whole), tuple(replace(model, budget=budget) for model in made))


def _without_lenient(values, source: str):
    """[service] without the option of old that `strict` has replaced."""
    if not isinstance(values, Mapping) or not isinstance(values.get("lenient"), bool):
        return values
    log.warning("%s: [service] lenient is no option any more; what it did is the default: write strict = %s", source,
                str(not values["lenient"]).lower())
    rest = {name: value for name, value in values.items() if name != "lenient"}
    return {"strict": not values["lenient"], **rest}


def _shared() -> dict[str, Option]:
    """Options that [engine] may set for all models."""
    return {name: option for name, option in MODEL.items() if option.goes != "model" and name != "spec"}


def _model(name, values, common, above, templates, first: bool) -> ModelConfig:
    own = _read(values, MODEL, f"[models.{name}] ")
    chosen = common | own | above
    if "path" not in chosen:
        raise RequestError(f"[models.{name}] has no path")
    for key in ("prompt_template", "encoder_template"):
        if key in chosen:
            chosen[key] = _template(chosen[key], templates, f"[models.{name}] {key}")

    strategy = {"decoding_alg": chosen.get("decoding_strategy"), "temperature": chosen.get("temperature")}
    try:
        settings = Settings.of({key: value for key, value in strategy.items() if value is not None})
        for reason in settings.ignored.values():
            raise RequestError(reason)
    except RequestError as error:
        raise RequestError(f"[models.{name}] {error}") from None

    def part(goes):
        return MappingProxyType({key: value for key, value in chosen.items() if MODEL[key].goes == goes})

    return ModelConfig(name, chosen["path"], chosen.get("aliases", ()), chosen.get("preload", first),
                       part("load"), part("engine"), part("prompt"), frozenset(own),
                       table={key: f"[models.{name}]" if key in own else "[engine]" for key in chosen.keys() - above})


def _read(values: Mapping[str, Any], options: Mapping[str, Option], place: str = "") -> dict[str, Any]:
    """Checked values under the options' own names. place: where they are in the file; "": they are not from there."""
    names = {alias: name for name, option in options.items() for alias in (name, *option.aliases)}
    chosen: dict[str, Any] = {}
    for key, value in _table(values, place).items():
        if key not in names:
            raise RequestError(f"{place}there is no option {key!r}{did_you_mean(key, names)}")
        if names[key] in chosen:
            raise RequestError(f"{place}{key} and {names[key]} are the same option: give one of them")
        chosen[names[key]] = options[names[key]].read(value, place + key if place else option(key))
    return chosen


def _table(value, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{place.strip() or 'options'} should be a table, is {value!r:.80}")
    return value


def _templates(values) -> dict[str, str]:
    """Named prompt templates: a text, or a list of lines."""
    templates = {}
    for name, value in _table(values, "[prompt_templates] ").items():
        lines = value if isinstance(value, list) else [value]
        if not all(isinstance(line, str) for line in lines):
            raise RequestError(f"[prompt_templates] {name} should be text or a list of lines")
        text = "\n".join(lines)
        if "{query}" not in text and "{_query}" not in text:
            raise RequestError(f"[prompt_templates] {name} has no {{query}}: the question would have no place")
        templates[name] = text
    return templates


def _template(value: str, templates, place: str) -> str:
    """A template given in full, or by its name, which has no brace."""
    if "{" in value:
        return value
    if value not in templates:
        raise RequestError(f"{place}: there is no prompt template {value!r}{did_you_mean(value, templates)}")
    return templates[value]
