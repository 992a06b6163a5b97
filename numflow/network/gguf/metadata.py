"""GGUF metadata of a model's hyper-parameters: a spec's source tables in reverse.

A parameter `{ config = "num_hidden_layers", gguf = "block_count" }` is read from config.json; its value is written
under the GGUF key. A spec's [gguf.metadata] adds and replaces keys.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from numflow.errors import SpecError
from numflow.spec.reader import Spec
from numflow.spec.resolve import Resolved
from numflow.spec.schema import SECTIONS

_ABSENT = (None, "none", 0, 0.0)


def metadata_of(spec: Spec, architecture: str, source: Resolved, layers: int, further: int = 0) -> dict[str, Any]:
    """GGUF metadata with complete keys, for the model of `source`.

    spec: the family's spec, with the GGUF keys; the spec of `source` is this one or extends it. Values that differ by
    layer are those of the last layer, which has experts if any layer has. further: number of MTP blocks.
    """
    found = {key: value for key, value in _of_sources(spec, source, layers - 1) if not _absent(value)}
    for key, text in spec.section("gguf").get("metadata", {}).items():
        value = _stated(source, f"gguf.metadata.{key}", text, layers, further)
        found.pop(key, None)
        if value not in (None, "none") and not (isinstance(value, list) and all(one is False for one in value)):
            found[key] = value
    if further:
        found |= {"block_count": layers + further, "nextn_predict_layers": further}
    named = {f"{architecture}.{key}": value for key, value in found.items()}
    return {"general.architecture": architecture, **named}


def _absent(value: Any) -> bool:
    """Whether a value needs no key: none, zero, a negative id, or a list of such values."""
    if isinstance(value, list):
        return all(_absent(item) or item is False for item in value) or any(isinstance(item, str) for item in value)
    return value is None or value == "none" or (not isinstance(value, bool) and value in _ABSENT) or (
        type(value) is int and value < 0)


def _of_sources(spec: Spec, source: Resolved, layer: int) -> Iterator[tuple[str, Any]]:
    for name, table in spec.section("parameters").items():
        if keys := _gguf_keys(table):
            try:
                value = source.parameter(name)
            except SpecError:  # known in GGUF files only: [gguf.metadata] must define it
                continue
            yield keys[0], _word(table, value)
    for section, key, table in _options(spec):
        if keys := _gguf_keys(table):
            yield keys[0], _word(table, source.option(section, key, layer))


def _options(spec: Spec) -> Iterator[tuple[str, str, Any]]:
    for tables in (spec.table, spec.section("gguf")):
        for section in SECTIONS:
            for key, table in tables.get(section, {}).items():
                yield section, key, table


def _gguf_keys(table: Any) -> list[str]:
    keys = table.get("gguf", []) if isinstance(table, Mapping) else []
    return [keys] if isinstance(keys, str) else list(keys)


def _word(table: Mapping[str, Any], value: Any) -> Any:
    """The inverse of `map`: the file's word for a value, or the integer if words are digits."""
    words = [word for word, meaning in table.get("map", {}).items() if meaning == value]
    numbers = [int(word) for word in words if word.isdigit()]
    return next(iter(numbers or words), value)


def _stated(source: Resolved, where: str, text: Any, layers: int, further: int) -> Any:
    """The value of a literal or expression. `{ each = "..." }`: a list with one value per layer and MTP block, with
    `further = false` per layer only."""
    if isinstance(text, Mapping):
        return [source.evaluate(where, text["each"], layer, "draft" if layer >= layers else "")
                for layer in range(layers + (further if text.get("further", True) else 0))]
    return source.evaluate(where, text, layers - 1) if isinstance(text, str) else text
