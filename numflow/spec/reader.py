"""Reader of specification files: TOML, `extends`, and strict checks. Errors name file, key and expected value."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from numflow.errors import ModelNotFoundError, SpecError, did_you_mean, quoted
from numflow.spec import schema
from numflow.spec.expression import ExpressionError, parse
from numflow.spec.kinds import SpecOption
from numflow.spec.modules import MODULES
from numflow.spec.paths import specs_dir
from numflow.spec.schema import SECTIONS

_DEPTH = 16
_MOST_BYTES = 1 << 18  # size limit of a file; the longest shipped file has 6 kB
_DETECT = re.compile(r"^\[detect\][^\n]*\n(.*?)(?=^\s*\[|\Z)", re.MULTILINE | re.DOTALL)  # content of [detect]
_PYTHON_TYPES = {"int": int, "float": (int, float), "bool": bool, "text": str, "choice": str, "list": list}


@dataclass(frozen=True)
class Spec:
    """A specification after `extends`: tables as in the file, checked but not yet resolved.

    name:  the file's stem. chain: this file, then the files that it extends.
    table: the merged TOML tables.
    enclosed: the spec came inside a model file and is as little trusted as that file.
    """

    name: str
    chain: tuple[Path, ...]
    table: Mapping[str, Any] = field(repr=False)
    enclosed: bool = False

    @property
    def path(self) -> Path:
        return self.chain[0]

    @property
    def type(self) -> str:
        """ "decoder", "encoder", "encoder-decoder" or "draft"."""
        return self.table.get("model", {}).get("type", "decoder")

    @property
    def title(self) -> str:
        return self.table.get("model", {}).get("title", self.name)

    def section(self, name: str) -> Mapping[str, Any]:
        return self.table.get(name, {})


def load_spec(path_or_name: str | Path, enclosed: bool = False, base: str = "") -> Spec:
    """Read a spec by path ("my.toml") or by the name of a shipped one ("family_7b").

    enclosed: the spec came inside a model file: it may extend only files that came with it and shipped specs.
    base: spec that the last file of the chain extends, for specs with `extends_part` (detect.on_parts).

    Raises:
        ModelNotFoundError: no such file or name.
        SpecError: unreadable, unknown key, wrong type, circular `extends`.
    """
    try:
        return _load(path_or_name, enclosed, base)
    except RecursionError:
        raise SpecError(f"{path_or_name}: tables or lists are nested too deeply") from None


def _load(path_or_name: str | Path, enclosed: bool, base: str) -> Spec:
    path = _find(path_or_name, None)
    chain: list[Path] = []
    files = []
    while True:
        if path in chain or len(chain) >= _DEPTH:
            raise SpecError(f"{chain[0]}: 'extends' goes in a circle ({' -> '.join(p.stem for p in [*chain, path])})")
        chain.append(path)
        modified, table = _parse(path, _checked_tables)
        files.append((path, modified))
        parent = table.get("extends")
        if parent is None and base:
            parent, base = base, ""
        if parent is None:
            break
        path = _find_enclosed(parent, path) if enclosed else _find(parent, path)
    return Spec(chain[0].stem, tuple(chain), _merged(tuple(files)), enclosed)


def list_specs(directory: Path | None = None) -> list[Spec]:
    """All shipped specs that describe a model. Files whose name starts with "_" are only extended by others."""
    files = sorted((directory or specs_dir()).glob("*.toml"))
    return [load_spec(path) for path in files if not path.stem.startswith("_")]


def detect_tables() -> dict[str, Mapping[str, Any]]:
    """[detect] of every shipped spec that has one, by name; parses nothing else of the files, so it is quick."""
    tables = {path.stem: _parse(path, _detect_table)[1] for path in sorted(specs_dir().glob("*.toml"))}
    return {name: table for name, table in tables.items() if table}


def _find(path_or_name: str | Path, beside: Path | None) -> Path:
    """Path of a spec: a path as given, a path relative to the file `beside` that extends it, or a shipped name."""
    text = str(path_or_name)
    if found := _in([Path("."), *([beside.parent] if beside else []), specs_dir()], text):
        return found
    if beside:
        raise SpecError(f"{beside}: extends {quoted(text)}, which is neither a file nor a shipped spec{_hint(text)}")
    raise ModelNotFoundError(f"no specification file or shipped spec {quoted(text)}{_hint(text)}")


def _find_enclosed(text: str, beside: Path) -> Path:
    """Path of the spec that an enclosed spec extends: a file that came with it, else a shipped spec.

    Only the file name counts, because folders may differ from those on the machine that made the model file.
    """
    if found := _in([beside.parent, specs_dir()], re.split(r"[\\/]", text)[-1]):
        return found
    raise SpecError(f"{beside}: extends {quoted(text)}, which is neither in the model's file nor a shipped spec"
                    f"{_hint(text)}")


def _in(folders: list[Path], name: str) -> Path | None:
    for folder in folders:
        for candidate in (folder / name, folder / f"{name}.toml"):
            try:
                if candidate.is_file():
                    return candidate.resolve()
            except (OSError, ValueError):  # a name that no file can have
                return None
    return None


def _hint(text: str) -> str:
    return did_you_mean(Path(text[-100:]).stem, [p.stem for p in specs_dir().glob("*.toml") if p.stem[0] != "_"])


def own_tables(path: Path) -> Mapping[str, Any]:
    """Tables of one file, without inherited ones."""
    return _parse(path, _tables)[1]


def _parse(path: Path, read: Callable[[Path, int], dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Time of the file's last change, and the tables that `read` finds."""
    try:
        modified = path.stat().st_mtime_ns
        return modified, read(path, modified)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None


@lru_cache(maxsize=512)
def _tables(path: Path, modified: int) -> dict[str, Any]:
    """Tables of a file, cached and never modified. `modified` is part of the cache key."""
    return tomllib.loads(_text(path))


@lru_cache(maxsize=512)
def _detect_table(path: Path, modified: int) -> dict[str, Any]:
    text = _text(path)
    if part := _DETECT.search(text):
        return tomllib.loads(part[1])
    return _tables(path, modified).get("detect", {}) if "detect" in text else {}


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise SpecError(f"{path}: longer than {_MOST_BYTES} bytes, so no specification")
    return data.decode("utf-8")


@lru_cache(maxsize=512)
def _checked_tables(path: Path, modified: int) -> dict[str, Any]:
    """Tables of a file that passes the checks."""
    table = _tables(path, modified)
    _check_file(path, table)
    return table


@lru_cache(maxsize=512)
def _merged(files: tuple[tuple[Path, int], ...]) -> dict[str, Any]:
    """Merged tables of files, each with the time of its last change, of which each extends the next; never modified."""
    tables = [_checked_tables(*file) for file in files]
    merged: dict[str, Any] = {}
    for table in reversed(tables):
        _merge(merged, {k: v for k, v in table.items() if k not in ("extends", "detect")}, "")
    # [detect] and [gguf.written] are not inherited: a model that extends a family is chosen by name, and readers of
    # its own GGUF architecture decide which tensor names to write.
    merged["detect"] = tables[0].get("detect", {})
    if "gguf" in merged:
        merged["gguf"]["written"] = tables[0].get("gguf", {}).get("written", {})
    return merged


def _merge(target: dict[str, Any], source: Mapping[str, Any], at: str) -> None:
    """Merge tables key by key: `ignore` lists are concatenated, all other values replaced."""
    for key, value in source.items():
        old = target.get(key)
        is_option = at.rpartition(".")[2] in SECTIONS
        if isinstance(old, dict) and isinstance(value, Mapping) and not is_option:
            _merge(old, value, f"{at}.{key}" if at else key)
        elif key == "ignore" and isinstance(old, list):
            target[key] = [*old, *(v for v in value if v not in old)]
        elif isinstance(value, Mapping):
            target[key] = {}
            _merge(target[key], value, f"{at}.{key}" if at else key)
        else:
            target[key] = value


# Checks of one file before merging, so that each error names the right file.

def _check_file(path: Path, table: Mapping[str, Any]) -> None:
    _check_keys(path, "", table, schema.TOP_KEYS)
    for key, value in table.items():
        match key:
            case "extends":
                _expect(path, key, value, str, "the name of a spec")
            case "extends_part":
                _expect_texts(path, key, value)
                if "extends" in table:
                    raise SpecError(f"{path}: expected extends or extends_part, found both")
            case "model":
                _check_model(path, value)
            case "detect":
                _check_detect(path, value)
            case "parameters":
                _check_parameters(path, value)
            case "unconfirmed":
                _expect(path, key, value, dict, "a table")
                _check_keys(path, key, value, ("keys",))
                _expect_texts(path, f"{key}.keys", value.get("keys", []))
            case _:
                _check_part(path, key, key, value)


def _check_part(path: Path, where: str, key: str, value: Any) -> None:
    """Check a section, a tensor table, or a [gguf] / [encoder] table of such parts."""
    if key in schema.NAMINGS or key in schema.STACKS:
        _expect(path, where, value, dict, "a table")
        allowed = schema.NAMING_KEYS if key in schema.NAMINGS else SECTIONS
        _check_keys(path, where, value, allowed)
        for inner, part in value.items():
            _check_part(path, f"{where}.{inner}", inner, part)
    elif key == "tensors":
        _expect(path, where, value, dict, "a table")
        for module, pattern in value.items():
            name = module.split("enc.", 1)[-1].split("dec.", 1)[-1]
            _check_keys(path, where, [name], MODULES)
            _expect_texts(path, f"{where}.{module}", pattern)
    elif key == "transposed":
        _expect_texts(path, where, value)
        _check_keys(path, where, [value] if isinstance(value, str) else value, MODULES)
    elif key in ("ignore", "prefix", "within"):
        _expect_texts(path, where, value)
    elif key == "defaults":
        _expect(path, where, value, dict, "a table")
        for kind, values in value.items():
            _expect(path, f"{where}.{kind}", values, dict, "a table of keys that config.json may leave out")
    elif key == "written":
        _expect(path, where, value, dict, "a table")
        _check_keys(path, where, value, MODULES)
        for module, text in value.items():
            check_option(path, f"{where}.{module}", SpecOption("bool", None, ""), text)
    elif key == "metadata":
        _check_metadata(path, where, value)
    elif key == "draft_layer":
        _expect(path, where, value, str, "the beginning of names of tensors")
    else:
        _expect(path, where, value, dict, "a table")
        _check_keys(path, where, value, SECTIONS[key])
        for name, setting in value.items():
            check_option(path, f"{where}.{name}", SECTIONS[key][name], setting)


def check_option(path: Path, where: str, option: SpecOption, value: Any) -> None:
    """Check an option's value: a literal of its kind, an expression, or an inline source table.

    Raises:
        SpecError: naming file, key, what was expected and what was found.
    """
    if isinstance(value, dict):
        _check_source(path, where, value)
        return
    if isinstance(value, str) and (option.kind in ("int", "float", "bool", "list")
                                   or (option.kind == "choice" and value.startswith("="))):
        try:
            parse(value.removeprefix("="))
        except ExpressionError as error:
            raise SpecError(f"{path}: {where}: expected {_article(option.kind)} or an expression: {error}") from None
        return
    wrong = not isinstance(value, _PYTHON_TYPES[option.kind]) or (
        isinstance(value, bool) and option.kind in ("int", "float"))
    if wrong:
        raise SpecError(f"{path}: {where}: expected {_article(option.kind)}, found {quoted(value)}")
    if option.kind == "choice" and value not in option.choices:
        raise SpecError(f"{path}: {where}: expected one of {', '.join(option.choices)}, found {quoted(value)}"
                        f"{did_you_mean(value, option.choices)}")
    if option.kind in ("int", "float") and not option.holds(value):
        raise SpecError(f"{path}: {where}: expected {option.range}, found {quoted(value)}")


def _check_metadata(path: Path, where: str, table: Any) -> None:
    """Check [gguf.metadata]: literals, expressions, or { each = expression, further = bool }."""
    _expect(path, where, table, dict, "a table")
    for name, value in table.items():
        if isinstance(value, dict):
            _check_keys(path, f"{where}.{name}", value, ("each", "further"))
            _expect(path, f"{where}.{name}.further", value.get("further", True), bool, "true or false")
            value = value.get("each")
        check_option(path, f"{where}.{name}", SpecOption("float", None, ""), True if isinstance(value, bool) else value)


def _check_model(path: Path, table: Any) -> None:
    _expect(path, "model", table, dict, "a table")
    _check_keys(path, "model", table, schema.MODEL_KEYS)
    for key, value in table.items():
        _expect(path, f"model.{key}", value, str, "text")
    if table.get("type", "decoder") not in schema.MODEL_TYPES:
        raise SpecError(f"{path}: model.type: expected one of {', '.join(schema.MODEL_TYPES)}, found "
                        f"{quoted(table['type'])}")


def _check_detect(path: Path, table: Any) -> None:
    _expect(path, "detect", table, dict, "a table")
    _check_keys(path, "detect", table, schema.DETECT_KEYS)
    for key in ("architectures", "model_type", "gguf"):
        if key in table:
            _expect_texts(path, f"detect.{key}", table[key])
    if "when" in table:
        check_option(path, "detect.when", SpecOption("bool", None, ""), table["when"])


def _check_parameters(path: Path, table: Any) -> None:
    _expect(path, "parameters", table, dict, "a table")
    for name, source in table.items():
        where = f"parameters.{name}"
        if not name.isidentifier():
            raise SpecError(f"{path}: {where}: a parameter's name is a word of letters, digits and _")
        if isinstance(source, dict):
            _check_source(path, where, source)


def _check_source(path: Path, where: str, source: dict[str, Any]) -> None:
    """Check a source table."""
    _check_keys(path, where, source, schema.SOURCE_KEYS)
    for key in ("config", "gguf", "llama2c"):
        if key in source:
            _expect_texts(path, f"{where}.{key}", source[key])
    if "map" in source:
        _expect(path, f"{where}.map", source["map"], dict, "a table of words")
    if "words" in source:
        _expect(path, f"{where}.words", source["words"], list, "a list of words")
    for key in ("items", "least", "most"):
        for text in source[key] if isinstance(source.get(key), list) and key == "items" else [source.get(key, 0)]:
            check_option(path, f"{where}.{key}", SpecOption("int", None, ""), text)
    if isinstance(source.get("default"), dict):
        raise SpecError(f"{path}: {where}.default: expected a value or an expression, found a table")
    if isinstance(source.get("null", 0), (dict, list)):
        raise SpecError(f"{path}: {where}.null: expected a value, found {quoted(source['null'])}")
    if where.startswith("parameters.") and isinstance(source.get("default"), str):
        check_option(path, f"{where}.default", SpecOption("float", None, ""), source["default"])


def _check_keys(path: Path, where: str, keys: Iterable[str], allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for key in keys:
        if key not in allowed:
            name = f"{where}.{key}" if where else key
            raise SpecError(f"{path}: unknown key {quoted(name)}{did_you_mean(key, allowed)}")


def _expect(path: Path, where: str, value: Any, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise SpecError(f"{path}: {where}: expected {expected}, found {quoted(value)}")


def _expect_texts(path: Path, where: str, value: Any) -> None:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, str):
            raise SpecError(f"{path}: {where}: expected text or a list of texts, found {quoted(value)}")


def _article(kind: str) -> str:
    return {"int": "an integer", "float": "a number", "bool": "true or false", "text": "text",
            "choice": "a word", "list": "a list"}[kind]
