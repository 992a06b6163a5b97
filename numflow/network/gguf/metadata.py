"""GGUF metadata of a model's sizes: a spec's sources read the other way round.

A parameter `{ config = "num_hidden_layers", gguf = "block_count" }` has been read from config.json; here its value is
written under the GGUF key. A spec's [gguf.metadata] adds keys and replaces what sources would give.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from numflow.errors import SpecError
from numflow.spec.reader import Spec
from numflow.spec.resolve import Resolved
from numflow.spec.schema import SECTIONS

_ABSENT = (None, "none", 0, 0.0)


def metadata_of(spec: Spec, architecture: str, source: Resolved, layers: int, further: int = 0) -> dict[str, Any]:
    """GGUF metadata, keys complete, for a model whose values `source` holds.

    spec: the family's, with the GGUF keys; the spec of `source` is this one or extends it. What may differ by layer is
    taken from the last one, which has experts where any has. further: blocks behind the last layer.
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
    """Whether a value goes without saying: none, zero, a negative id, nothing of it in any layer."""
    if isinstance(value, list):
        return all(_absent(item) or item is False for item in value) or any(isinstance(item, str) for item in value)
    return value is None or value == "none" or (not isinstance(value, bool) and value in _ABSENT) or (
        type(value) is int and value < 0)


def _of_sources(spec: Spec, source: Resolved, layer: int) -> Iterator[tuple[str, Any]]:
    for name, table in spec.section("parameters").items():
        if keys := _gguf_keys(table):
            try:
                value = source.parameter(name)
            except SpecError:  # only GGUF files say it: [gguf.metadata] has to
                continue
            yield keys[0], _word(table, value)
    for section, key, table in _options(spec):
        if keys := _gguf_keys(table):
            yield keys[0], _word(table, source.option(section, key, layer))


def _options(spec: Spec) -> Iterator[tuple[str, str, Any]]:
    for place in (spec.table, spec.section("gguf")):
        for section in SECTIONS:
            for key, table in place.get(section, {}).items():
                yield section, key, table


def _gguf_keys(table: Any) -> list[str]:
    keys = table.get("gguf", []) if isinstance(table, Mapping) else []
    return [keys] if isinstance(keys, str) else list(keys)


def _word(table: Mapping[str, Any], value: Any) -> Any:
    """The file's own word for a value that a `map` has translated; a number where the file has numbers."""
    words = [word for word, meaning in table.get("map", {}).items() if meaning == value]
    numbers = [int(word) for word in words if word.isdigit()]
    return next(iter(numbers or words), value)


def _stated(source: Resolved, where: str, text: Any, layers: int, further: int) -> Any:
    """A literal or an expression; `{ each = "..." }` is one value for every layer and block behind them, with
    `further = false` for every layer alone."""
    if isinstance(text, Mapping):
        return [source.evaluate(where, text["each"], layer, "draft" if layer >= layers else "")
                for layer in range(layers + (further if text.get("further", True) else 0))]
    return source.evaluate(where, text, layers - 1) if isinstance(text, str) else text
