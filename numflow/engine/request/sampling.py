"""Default sampling settings of a conversation. The same precedence for the command line, Python, HTTP and the chat
page:

    the request > the service's configuration (server/messages/settings.py) > the model's given files
    (defaults.py) > the list of models (registry/models.toml) > CHAT

A prompt that is continued without a chat template (`--raw`, /v1/completions) has the request's settings alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numflow.decoding.settings import DEFAULTS, FILTERS, without_effect

CHAT = {"temperature": 0.7, "min_p": 0.05}  # if neither the model's files nor the list of models have settings


@dataclass(frozen=True)
class Source:
    """Sampling settings and the name of their source. Without a temperature, `values` is incomplete."""

    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def model_sampling(own: Source, listed: Mapping[str, Any], decoder: bool) -> Source:
    """Default sampling settings of a model: the settings of its files, completed by a source with a temperature.

    own:    settings of the model's files. listed: settings in the list of models.
    decoder: whether CHAT is the last source: an encoder-decoder without settings is greedy.
    """
    defaults = Source(listed, "the list of models") if listed else Source(CHAT if decoder else {}, "numflow")
    if "temperature" in own.values:
        return own
    return Source({**defaults.values, **own.values}, f"{own.name} and {defaults.name}") if own.values else defaults


def with_model_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a request, completed by `defaults` that have an effect in combination with them.

    A request with a strategy of Inferflow (decoding_alg) or a beam search gets no defaults.
    """
    given = {name: value for name, value in given.items() if value is not None or name != "temperature"}
    if given.get("decoding_alg") is not None or given.get("num_beams", 1) != 1:
        return given
    samplers = given.get("samplers", DEFAULTS["samplers"])
    if not isinstance(samplers, Sequence):
        return given  # refused later, because of samplers
    settings = {**defaults, **given}
    dropped = without_effect({**DEFAULTS, **settings, "samplers": samplers})
    if "temperature" in dropped and "temperature" not in given:
        settings["temperature"] = FILTERS["temperature"]
    return {name: value for name, value in settings.items()
            if name in given or name not in dropped or name == "temperature"}

