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
    """Configuration of one model. The mappings contain only options that were given.

    load, engine: keyword arguments of numflow.load and of Engine. prompt: options of prompts and default settings.
    own: names of the options in the model's own table. budget: limits of one request.
    table: the table of the file that each option comes from, for options from the file.
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
        """An option for a message, as written in the file; None for an option that is not from the file."""
        return f"{self.table[name]} {in_config(name, value)}" if name in self.table else None


@dataclass(frozen=True)
class Config:
    """Configuration of the service. service: every option of options.SERVICE. models: at least one."""

    service: Mapping[str, Any]
    models: tuple[ModelConfig, ...]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["service"][name]  # self.service would recurse in an object that is being unpickled
        except KeyError:
            raise AttributeError(name) from None

    def __post_init__(self):
        if not self.models:
            raise RequestError("no model: name one with -m, or in a [models.NAME] table of the configuration file")
        seen: set[str] = set()
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    raise RequestError(f"two models have the name {name!r}")
                seen.add(name)


def read_config(path: Path | str) -> dict[str, Any]:
    """Read the tables of a configuration file, for `make_config`.

    Raises:
        RequestError: the file cannot be read, or is no TOML.
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
    """Make and check a configuration.

    tables:      content of a file: [service], [engine] (options of all models), [models.NAME],
                 [prompt_templates] (name = text). source: name of the file, for messages.
    service, every_model: options that override the file's. models: replace the models of the file, if given.

    Raises:
        RequestError: an option does not exist (the message has the closest one that does), or is out of range.
    """
    for name in tables:
        if name not in TABLES:
            raise RequestError(f"{source}: there is no table [{name}]{did_you_mean(name, TABLES)}")
    service_options, model_options = _read(service or {}, SERVICE), _read(every_model or {}, MODEL)
    try:
        file_options = _without_lenient(tables.get("service", {}), source)
        chosen = _read(file_options, SERVICE, "[service] ") | service_options
        engine_options = _read(tables.get("engine", {}), _shared(), "[engine] ")
        found = _table(models, "") if models is not None else _table(tables.get("models", {}), "[models] ")
        templates = _templates(tables.get("prompt_templates", {}))
        made = tuple(_model(name, _table(values, f"[models.{name}] "), engine_options, model_options, templates,
                            first=not index) for index, (name, values) in enumerate(found.items()))
    except RequestError as error:
        raise RequestError(f"{source}: {error}") from None
    whole = {name: option.default for name, option in SERVICE.items()} | chosen
    if whole["replicas"] and whole["slot_folder"]:
        raise RequestError(f"{source}: slot_folder does not work with replicas: each replica has its own slots")
    if whole["load_adapters"]:  # adapters may be loaded later, also by a model without any yet
        made = tuple(replace(model, load=MappingProxyType({"adapters": {}, **model.load})) for model in made)
    budget = Budget(**{limit.name: whole[limit.name] for limit in fields(Budget)})
    return Config(MappingProxyType(whole), tuple(replace(model, budget=budget) for model in made))


def _without_lenient(values, source: str):
    """[service] without the former option `lenient`, which `strict` has replaced."""
    if not isinstance(values, Mapping) or not isinstance(values.get("lenient"), bool):
        return values
    log.warning("%s: [service] lenient is replaced by strict: write strict = %s", source,
                str(not values["lenient"]).lower())
    rest = {name: value for name, value in values.items() if name != "lenient"}
    return {"strict": not values["lenient"], **rest}


def _shared() -> dict[str, Option]:
    """Options that [engine] may set for all models."""
    return {name: option for name, option in MODEL.items() if option.goes != "model" and name != "spec"}


def _model(name, values, engine_options, model_options, templates, first: bool) -> ModelConfig:
    model_table = _read(values, MODEL, f"[models.{name}] ")
    chosen = engine_options | model_table | model_options
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
                       part("load"), part("engine"), part("prompt"), frozenset(model_table),
                       table={key: f"[models.{name}]" if key in model_table else "[engine]"
                              for key in chosen.keys() - model_options})


def _read(values: Mapping[str, Any], options: Mapping[str, Option], place: str = "") -> dict[str, Any]:
    """Checked values by the options' main names. place: prefix of the table in the file; "": not from the file."""
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
            raise RequestError(f"[prompt_templates] {name} has no {{query}}, the place of the question")
        templates[name] = text
    return templates


def _template(value: str, templates, place: str) -> str:
    """A template, given in full or by its name (without a brace)."""
    if "{" in value:
        return value
    if value not in templates:
        raise RequestError(f"{place}: there is no prompt template {value!r}{did_you_mean(value, templates)}")
    return templates[value]
