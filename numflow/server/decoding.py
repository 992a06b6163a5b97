"""From a request's fields to the engine's settings."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from numflow.decoding.names import inferflow
from numflow.decoding.settings import FILTERS
from numflow.engine.settings import Settings
from numflow.errors import did_you_mean
from numflow.server.errors import bad_request
from numflow.server.schemas import ChatRequest, CompletionRequest, Generating, ResponseFormat

# Settings that requests do not give by these names, or not at all.
HIDDEN = {"chat", "decoder_ids", "dry_breakers", "echo", "prompt_logprobs", "best_of", "logprobs", "n"}
OWN = {field.name for field in fields(Settings)} - HIDDEN | {"decoding_alg"}
COMMON = ("temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
STRATEGIES = {*FILTERS, "mirostat", "fsd", "samplers"} - {"temperature"}  # each makes a strategy of the request's own
COMPLETION_TOKENS = 16  # new tokens of /v1/completions without max_tokens, as OpenAI documents


def own_settings(extra: Mapping[str, Any] | None, declared, lenient: bool) -> dict[str, Any]:
    """Fields beside the declared ones, which have to be settings of numflow's.

    Raises:
        ApiError: one is not, and the service is not lenient.
    """
    given = {name: value for name, value in (extra or {}).items() if value is not None}
    for name in [name for name in given if name not in OWN]:
        if not lenient:
            raise bad_request(f"there is no field {name!r:.100}{did_you_mean(name, {*declared, *OWN})}", name[:100],
                              "unknown_field")
        del given[name]
    return given


def generating(body: Generating, defaults: Mapping[str, Any], lenient: bool) -> dict[str, Any]:
    """Settings that both of OpenAI's routes share. defaults: of the model, from the service's configuration."""
    given = {name: getattr(body, name) for name in COMMON if getattr(body, name) is not None}
    own = own_settings(body.model_extra, type(body).model_fields, lenient)
    settings = with_defaults({**own, **given}, defaults)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only for streams: set stream", "stream_options")
    return settings


def with_defaults(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a request, with the configured strategy and temperature where it has none.

    A request that names a strategy or a filter of its own gets no other; one that wants the likeliest token where the
    configuration draws, or the reverse, decides. Without any of these a temperature of 1 is OpenAI's and Inferflow's
    default.
    """
    if "decoding_alg" in given or "num_beams" in given:
        return given
    own = {"temperature": defaults["temperature"]} if "temperature" in defaults else {}
    strategy, chosen = defaults.get("decoding_strategy"), {**own, **given}
    if strategy is None or any(name in given for name in STRATEGIES):
        return {"temperature": 1.0, **chosen}
    if "temperature" in chosen and (chosen["temperature"] == 0) != (inferflow(strategy)["temperature"] == 0):
        return chosen
    return {"decoding_alg": strategy, **chosen}


def chat_settings(body: ChatRequest, defaults: Mapping[str, Any], lenient: bool) -> dict[str, Any]:
    """Settings of a chat request, but for what tools add.

    Raises:
        ApiError: fields that contradict each other, or that are unknown.
    """
    settings = generating(body, defaults, lenient)
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    settings["max_tokens"] = limits.pop() if limits else defaults.get("max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        settings["logprobs"] = body.top_logprobs or 0
    schema = _schema(body.response_format)
    if schema is not None:
        settings["json_schema"] = schema
    return settings


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise bad_request("response_format of type json_schema needs json_schema.schema",
                          "response_format.json_schema.schema", "missing_field")
    return form.json_schema.schema_


def completion_settings(body: CompletionRequest, defaults: Mapping[str, Any], lenient: bool) -> dict[str, Any]:
    """Settings of a text completion.

    Raises:
        ApiError: fields that contradict each other, or that are unknown, or suffix.
    """
    if body.suffix:
        raise bad_request("suffix is not supported: text can only be continued, not filled in", "suffix", "unsupported")
    settings = generating(body, defaults, lenient)
    settings["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
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
            raise bad_request("best_of chooses at the end: it cannot be streamed", "best_of")
        settings["best_of"] = body.best_of
    return settings
