"""Convert a request's fields to the engine's settings."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from numflow.decoding.names import inferflow
from numflow.decoding.settings import FILTERS
from numflow.engine.request.settings import Settings
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.constraints import FIELDS, refuse, take
from numflow.server.messages.schemas import ChatRequest, CompletionRequest, GeneratingBody, Open, ResponseFormat, whole

# Settings that requests give under other names, or not at all.
HIDDEN = {"chat", "decoder_ids", "dry_breakers", "echo", "prompt_logprobs", "best_of", "logprobs", "n", "ignored",
          "json_schema", "regex", "grammar"}
OWN = {field.name for field in fields(Settings)} - HIDDEN | {"decoding_alg"}
COMMON = ("temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
STRATEGIES = {*FILTERS, "mirostat", "fsd", "samplers"} - {"temperature"}  # each replaces the configured strategy
LIKELIEST = 1e-6  # top_p for a request's top_p of 0: only the likeliest token
COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as OpenAI documents


def own_settings(body: Open, ignored: Ignored, form: ResponseFormat | None = None) -> dict[str, Any]:
    """Settings from undeclared fields: numflow's settings, and constraints under the names of other engines.

    form: the request's response_format.

    Raises:
        ApiError: a constraint cannot be met.
    """
    extra = dict(body.model_extra or {})
    given = take(extra, form)
    for name, value in extra.items():
        if name in OWN:
            given |= {} if value is None else {name: whole(value)}
            continue
        refuse(name, value)
        ignored.unknown(name, {*type(body).model_fields, *OWN, *FIELDS})
    return given


def generating(body: GeneratingBody, defaults: Mapping[str, Any], ignored: Ignored, talks: bool) -> dict[str, Any]:
    """Settings that OpenAI's chat and completion routes share. defaults: the configured defaults of the model. talks:
    whether the prompt is a conversation."""
    given = {name: getattr(body, name) for name in COMMON if getattr(body, name) is not None}
    if given.get("top_p") == 0:
        given["top_p"] = LIKELIEST
    if "stop" in given:
        given["stop"] = stops(given["stop"], ignored)
    if body.stream_options is not None and not body.stream:
        ignored.add("stream_options", "stream_options has no effect without stream: true")
    return with_defaults({**own_settings(body, ignored, body.response_format), **given}, defaults, talks)


def stops(stop: str | list[str], ignored: Ignored) -> list[str]:
    """Stop strings without empty ones, which some clients send for none."""
    given = [stop] if isinstance(stop, str) else stop
    found = [text for text in given if text]
    if len(found) < len(given):
        ignored.add("stop", "an empty stop string has no effect")
    return found


def with_defaults(given: dict[str, Any], defaults: Mapping[str, Any], talks: bool) -> dict[str, Any]:
    """Settings of a request, with the configured strategy and temperature as defaults.

    The configured strategy is not used if the request has its own strategy or filter, or if one of the two is greedy
    and the other samples. Without any of these, a conversation gets the model's defaults (engine/request/sampling.py),
    and a text completion gets temperature 1, as in OpenAI's and Inferflow's interfaces.
    """
    if "decoding_alg" in given or "num_beams" in given:
        return given
    default = {"temperature": defaults["temperature"]} if "temperature" in defaults else {}
    strategy, chosen = defaults.get("decoding_strategy"), {**default, **given}
    if strategy is None or any(name in given for name in STRATEGIES):
        return chosen if talks else {"temperature": 1.0, **chosen}
    if "temperature" in chosen and (chosen["temperature"] == 0) != (inferflow(strategy)["temperature"] == 0):
        return chosen
    return {"decoding_alg": strategy, **chosen}


def chat_settings(body: ChatRequest, defaults: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Settings of a chat request, without those for tools.

    Raises:
        ApiError: fields contradict each other, or a constraint cannot be met.
    """
    settings = generating(body, defaults, ignored, talks=True)
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    settings["max_tokens"] = _least(limits) if limits else defaults.get("max_tokens")
    if (body.overflow or defaults.get("overflow")) == "shift":
        settings["context_shift"] = True
    if body.top_logprobs is not None and not body.logprobs:
        ignored.add("top_logprobs", "top_logprobs has no effect without logprobs: true")
    if body.logprobs:
        settings["logprobs"] = body.top_logprobs or 0
    return settings


def completion_settings(body: CompletionRequest, defaults: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Settings of a text completion.

    Raises:
        ApiError: fields contradict each other, or a constraint cannot be met.
    """
    if body.suffix and body.echo:
        raise bad_request("echo cannot be combined with suffix", "echo")
    settings = generating(body, defaults, ignored, talks=False)
    settings["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else _least([body.max_tokens])
    if body.logprobs is not None:
        settings["logprobs"] = body.logprobs
    if body.echo:
        settings["echo"] = True
        if body.logprobs is not None:
            settings["prompt_logprobs"] = body.logprobs
    if body.best_of is not None and body.best_of != (body.n or 1):
        if body.best_of < (body.n or 1):
            raise bad_request("best_of is less than n", "best_of")
        if body.stream:
            raise bad_request("best_of cannot be streamed: the texts are chosen at the end", "best_of")
        settings["best_of"] = body.best_of
    return settings


def _least(limits: list[int]) -> int | None:
    """The smallest limit of new tokens; None if there is none (-1: as many as fit)."""
    return min((limit for limit in limits if limit >= 0), default=None)
