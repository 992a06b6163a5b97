"""Sampling of a conversation by default: one order for the command line, Python, HTTP and the chat page.

    what the request says > the service's configuration (server/messages/settings.py) > the model's own files
    (defaults.py) > the list of models (registry/models.toml) > CHAT

A text that is continued as it stands (`--raw`, /v1/completions) gets none of this but what its request says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numflow.decoding.settings import DEFAULTS, FILTERS, idle

CHAT = {"temperature": 0.7, "min_p": 0.05}  # where neither the model's files nor the list of models say anything


@dataclass(frozen=True)
class Source:
    """Settings of sampling, and who says them; `values` without a temperature are only a part."""

    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def chosen(own: Source, listed: Mapping[str, Any], talks: bool) -> Source:
    """The sampling of a model: the first source that says a temperature, below what comes before it.

    own: of the model's files. listed: of the list of models. talks: whether the last resort is for it; an encoder-
    decoder that says nothing takes the likeliest token.
    """
    below = Source(listed, "the list of models") if listed else Source(CHAT if talks else {}, "numflow")
    if "temperature" in own.values:
        return own
    return Source({**below.values, **own.values}, f"{own.name} and {below.name}") if own.values else below


def filled(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a request, with those of `below` that it does not give and that have an effect beside its own.

    A request that names a strategy of Inferflow's or a beam search gets nothing.
    """
    own = {name: value for name, value in given.items() if value is not None or name != "temperature"}
    if own.get("decoding_alg") is not None or own.get("num_beams", 1) != 1:
        return own
    samplers = own.get("samplers", DEFAULTS["samplers"])
    if not isinstance(samplers, Sequence):
        return own  # which is refused for that
    found = {**below, **own}
    without = idle({**DEFAULTS, **found, "samplers": samplers})
    if "temperature" in without and "temperature" not in own:
        found["temperature"] = FILTERS["temperature"]
    return {name: value for name, value in found.items() if name in own or name not in without or name == "temperature"}

