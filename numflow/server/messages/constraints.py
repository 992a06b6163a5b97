"""Constraints of the generated text (JSON schema, regular expression or grammar), also under the field names of other
engines. A constraint that cannot be met is refused, never ignored."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from numflow.server.http.errors import bad_request
from numflow.server.messages.schemas import ResponseFormat

Found = tuple[str, Any]  # kind (json_schema, regex, grammar), content
ANY_OBJECT = {"type": "object"}
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")


def _schema(value: Any, name: str) -> Found | None:
    if not isinstance(value, (str, Mapping, bool)):
        raise bad_request(f"{name} should be a JSON schema", name, "invalid_value")
    return "json_schema", value


def _text(kind: str) -> Callable[[Any, str], Found | None]:
    def read(value: Any, name: str) -> Found | None:
        if not isinstance(value, str):
            raise bad_request(f"{name} should be text", name, "invalid_value")
        return kind, value
    return read


def _grammar(value: Any, name: str) -> Found | None:
    """Text, or {"type", "value"} as in text-generation-inference."""
    if not isinstance(value, Mapping):
        return _text("grammar")(value, name)
    return _of_type(value, name)


def _choice(value: Any, name: str) -> Found | None:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise bad_request(f"{name} should be a non-empty list of texts", name, "invalid_value")
    return "regex", "|".join(_SPECIAL.sub(r"\\\1", text) for text in value)


def _object(value: Any, name: str) -> Found | None:
    if not isinstance(value, bool):
        raise bad_request(f"{name} should be true or false", name, "invalid_value")
    return ("json_schema", ANY_OBJECT) if value else None


def _format(value: Any, name: str) -> Found | None:
    """"json" or a JSON schema, as in Ollama."""
    if value == "":
        return None
    if value == "json":
        return "json_schema", ANY_OBJECT
    if not isinstance(value, Mapping):
        raise bad_request(f'{name} should be "json" or a JSON schema', name, "unsupported")
    return _schema(value, name)


# Fields inside vLLM's structured_outputs and its older guided_decoding. _LIBRARIES choose a library and are ignored;
# other fields are refused.
_PARTS: dict[str, Callable[[Any, str], Found | None]] = {
    "json": _schema, "regex": _text("regex"), "choice": _choice, "grammar": _text("grammar"), "json_object": _object}
_LIBRARIES = ("backend", "_backend", "disable_fallback", "backend_was_auto", "_backend_was_auto")


def _table(value: Any, name: str) -> Found | None:
    if not isinstance(value, Mapping):
        raise bad_request(f"{name} should be an object", name, "invalid_value")
    found = {}
    for key, part in value.items():
        if part in (None, False) or key in _LIBRARIES:
            continue
        if key not in _PARTS:
            raise bad_request(f"{name}.{key:.80} is not supported", f"{name}.{key:.80}", "unsupported")
        found[f"{name}.{key}"] = _PARTS[key](part, f"{name}.{key}")
    return _only(found)


FIELDS: dict[str, Callable[[Any, str], Found | None]] = {
    "json_schema": _schema, "guided_json": _schema, "guided_json_object": _object,
    "regex": _text("regex"), "guided_regex": _text("regex"), "regex_pattern": _text("regex"),
    "grammar": _grammar, "guided_grammar": _text("grammar"), "ebnf": _text("grammar"),
    "grammar_string": _text("grammar"), "guided_choice": _choice, "format": _format,
    "structured_outputs": _table, "guided_decoding": _table}

# Types of response_format (and of similar objects) -> names of the field with the content, and its reader.
_TYPES: dict[str, tuple[tuple[str, ...], Callable[[Any, str], Found | None]]] = {
    "json_schema": (("json_schema", "schema", "value"), _schema), "json": (("schema", "value"), _schema),
    "json_object": (("schema", "value"), _schema), "regex": (("regex", "pattern", "value"), _text("regex")),
    "grammar": (("grammar", "value"), _text("grammar")), "ebnf": (("ebnf", "grammar", "value"), _text("grammar")),
    "choice": (("choice", "choices", "value"), _choice)}


def _of_type(form: Mapping[str, Any], name: str) -> Found | None:
    """The constraint of an object with a field `type`."""
    kind = form.get("type")
    if kind == "text":
        return None
    if not isinstance(kind, str) or kind not in _TYPES:
        raise bad_request(f"{name} of type {kind!r:.80} is not supported; types: text, {', '.join(_TYPES)}",
                          f"{name}.type", "unsupported")
    fields, read = _TYPES[kind]
    field = next((field for field in fields if form.get(field) is not None), None)
    if field is None:
        if kind == "json_object":
            return "json_schema", ANY_OBJECT
        missing = f"{name}.{fields[0]}" + (".schema" if kind == "json_schema" else "")
        raise bad_request(f"{name} of type {kind} needs {missing.removeprefix(name + '.')}", missing, "missing_field")
    content, where = form[field], f"{name}.{field}"
    if field == "json_schema":
        content, where = content.get("schema") if isinstance(content, Mapping) else None, f"{where}.schema"
        if content is None:
            raise bad_request(f"{name} of type json_schema needs json_schema.schema", where, "missing_field")
    return read(content, where)


def of_format(form: ResponseFormat) -> Found | None:
    """The constraint of response_format.

    Raises:
        ApiError: its type is unknown, or it is incomplete.
    """
    content = _TYPES.get(form.type, ((),))[0]
    for name, value in (form.model_extra or {}).items():
        if name not in content:
            refuse(name, value, "response_format.")
    return _of_type(form.model_dump(by_alias=True), "response_format")


def take(extra: dict[str, Any], form: ResponseFormat | None = None) -> dict[str, Any]:
    """The settings for a request's constraint, {} without one. Its fields are removed from `extra`.

    Raises:
        ApiError: a constraint is invalid or cannot be met, or two constraints contradict each other.
    """
    found = {"response_format": of_format(form)} if form is not None else {}
    for name in [name for name in extra if name in FIELDS]:
        value = extra.pop(name)
        found[name] = None if value is None else FIELDS[name](value, name)
    only = _only(found)
    return {} if only is None else {only[0]: only[1]}


def _only(found: Mapping[str, Found | None]) -> Found | None:
    given = {name: one for name, one in found.items() if one is not None}
    names = list(given)
    for name in names[1:]:
        if given[name] != given[names[0]]:
            raise bad_request(f"{names[0]} contradicts {name}: leave out one of them", name)
    return given[names[0]] if names else None


# Words and names of unsupported fields that restrict the answer: an answer that ignores them would be wrong.
_WORDS = {"grammar", "regex", "regexp", "schema", "schemas", "guided", "structured", "structural", "ebnf", "gbnf",
          "lark", "constraint", "constraints", "constrained"}
_NAMES = {"json", "json_mode", "json_object", "response_format", "response_mime_type", "output_format", "output_config",
          "text_format", "format", "choice", "pattern", "functions", "function_call", "tools", "web_search_options",
          "audio", "image", "images", "image_url", "image_data", "video", "videos", "multi_modal_data",
          "allowed_token_ids", "bad_words", "bad_words_ids", "banned_strings", "force_words_ids"}
_NOTHING = ("none", "auto", "text", "text/plain")


def refuse(name: str, value: Any, path: str = "") -> None:
    """Refuse an unknown field that is a constraint or contains one.

    Raises:
        ApiError: it does.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name[:100])]
    asks = value not in _NOTHING and (bool(value) or (isinstance(value, (dict, list)) and name in FIELDS))
    if asks and "backend" not in words and ("_".join(words) in _NAMES or not _WORDS.isdisjoint(words)):
        where = f"{path}{name}"[:100]
        hint = "; it belongs at the top level of the request" if path and name in FIELDS else ""
        raise bad_request(f"{where} is not supported here, and cannot be ignored, since it restricts the answer{hint}",
                          where, "unsupported")
    refuse_inside(name, value, path)


def refuse_inside(name: str, value: Any, path: str = "") -> None:
    """Refuse a field that contains a constraint, unless the field itself is a known constraint.

    Raises:
        ApiError: it contains one.
    """
    if name in FIELDS and not path:
        return
    for part in value if isinstance(value, list) else [value]:
        for key, one in part.items() if isinstance(part, Mapping) else ():
            refuse(key, one, f"{path}{name}."[:100])
