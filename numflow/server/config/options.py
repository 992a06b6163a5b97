"""Options of the service's configuration file: name, check, default, help, and Inferflow's names for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numflow.engine.options import (
    CONFIG,
    COUNT,
    DEVICES,
    FLAG,
    FROM_ZERO,
    PATH,
    SIZE,
    TEXT,
    Check,
    EngineOptions,
    LoadOptions,
    one_of,
    rows,
)
from numflow.engine.request.budget import Budget
from numflow.errors import RequestError
from numflow.server.messages.overflow import POLICIES
from numflow.server.messages.tool_formats import find_format
from numflow.sizes import parse_bytes


@dataclass(frozen=True)
class Option:
    """One key of the file.

    read:    converts the value in the file, or raises RequestError.
    default: the value if the file has none.
    aliases: other names, from Inferflow's configuration.
    goes:    the consumer: "service", "load" (numflow.load), "engine" (Engine), "prompt", or "model" (the pool).
    """

    read: Callable[[Any, str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    goes: str = "service"


def _bytes(value, name):
    try:
        return parse_bytes(value)
    except RequestError:
        raise RequestError(f'{name} should be bytes, or text such as "8 GB" or "512MiB", is {value!r:.80}') from None


def _texts(value, name):
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise RequestError(f"{name} should be a list of texts, is {value!r:.80}")
    return tuple(values)


def _strategy(value, name):
    if not isinstance(value, (str, dict)):
        raise RequestError(f"{name} should be the name of a strategy, or a table of its settings, is {value!r:.80}")
    return value


def _tool_format(value, name):
    try:
        find_format(None, TEXT(value, name))
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    return value


def _file(value, name):
    if not Path(TEXT(value, name)).is_file():
        raise RequestError(f"{name}: there is no file {value}")
    return value


def _of_table(table: type, goes: str) -> dict[str, Option]:
    """An Option for each option of an engine's table."""
    return {row.name: Option(_READERS.get(facts.check, facts.check), row.default, facts.help_for(in_config),
                             facts.aliases, goes) for row, facts in rows(table, CONFIG)}


def in_config(name: str, value: str = "") -> str:
    """An option as it is written in the configuration file."""
    return f"{name} = {value}" if value else name


_any_text = Check(str, "text")
_seconds = Check((int, float), "seconds above 0", lambda value: value > 0)
_port = Check(int, "0 .. 65535", lambda value: 0 <= value <= 65535)
_READERS: dict[Check, Callable[[Any, str], Any]] = {
    SIZE: _bytes, PATH: TEXT, DEVICES: lambda value, name: TEXT(str(value) if type(value) is int else value, name)}

SERVICE = {
    "host": Option(TEXT, "127.0.0.1", "Address to listen on; 0.0.0.0 is every address of this machine."),
    "port": Option(_port, 8080, "Port to listen on; 0: any free port.", ("http_port",)),
    "api_keys": Option(_texts, (), "API keys. If any are given, every route but /health requires one of them."),
    "cors_origins": Option(_texts, (), "Origins of web pages that may call the service (CORS)."),
    "allowed_hosts": Option(_texts, (), "Host names that requests may use in their Host header, beside those of "
                            "loopback and of containers. Default: if the service listens beyond loopback, any name."),
    "max_body": Option(_bytes, 4 * 2**20, "Largest body of a request, in bytes."),
    "max_connections": Option(COUNT, 1024, "Largest number of connections; more get status 503."),
    "max_queue": Option(COUNT, 256, "Requests that may wait; more get status 429.", ("max_waiting",)),
    "requests_per_minute": Option(FROM_ZERO, 0, "Limit of POST requests per minute for each API key, without keys for "
                                  "all clients together; more get status 429. 0: no limit."),
    "tokens_per_minute": Option(FROM_ZERO, 0, "Limit of prompt and answer tokens per minute for each API key. An "
                                "answer may exceed it; the excess is taken from later requests. 0: no limit."),
    "tokens_per_day": Option(FROM_ZERO, 0, "Limit of prompt and answer tokens per day for each API key."),
    "unload_after": Option(FROM_ZERO, 0, "Seconds without requests after which a model is unloaded; the next request "
                           "loads it again. Ollama's keep_alive overrides it. 0: models stay loaded."),
    "max_prompt_tokens": Option(FROM_ZERO, 0, "Largest number of tokens of a prompt; 0: the model's context."),
    "max_choices": Option(COUNT, Budget.max_choices, "Answers of one request: prompts times n (or best_of)."),
    "max_beams": Option(COUNT, Budget.max_beams, "Largest num_beams of a request."),
    "max_logprobs": Option(FROM_ZERO, Budget.max_logprobs, "Largest number of alternatives with log-probabilities per "
                           "token."),
    "max_breakers": Option(COUNT, Budget.max_breakers, "Largest number of different texts in dry_sequence_breakers."),
    "max_bans": Option(COUNT, Budget.max_bans, "Largest number of entries of banned_tokens, and of stop_token_ids."),
    "max_bias": Option(COUNT, Budget.max_bias, "Largest number of entries of logit_bias."),
    "max_stops": Option(COUNT, Budget.max_stops, "Largest number of stop strings."),
    "max_grammar": Option(_bytes, Budget.max_grammar, "Largest JSON schema, regular expression or grammar, in bytes."),
    "max_responses": Option(FROM_ZERO, 1000, "Number of stored answers of /v1/responses, for previous_response_id; 0: "
                            "none."),
    "responses_memory": Option(_bytes, 64 * 2**20, "Memory for stored answers and their conversations, in bytes."),
    "slot_folder": Option(TEXT, None, "Folder in which POST /slots/{id} saves and restores texts; each API key has "
                          "its own folder in it. Default: saving is off.", ("slot_save_path",)),
    "slot_disk": Option(_bytes, 16 * 2**30, "Bytes of saved files in slot_folder, above which saving is refused."),
    "deletable": Option(FLAG, False, "Allow DELETE /api/delete to delete models that numflow has downloaded."),
    "request_timeout": Option(_seconds, 600, "Time limit of a request in seconds, waiting included."),
    "body_timeout": Option(_seconds, 30, "Seconds in which a request's body must arrive."),
    "write_timeout": Option(_seconds, 60, "Seconds after which a client that does not read its answer is "
                            "disconnected."),
    "drain_timeout": Option(_seconds, 30, "Seconds that running requests have to finish when the service is stopped."),
    "keep_alive": Option(_seconds, 15, "Seconds without data after which a comment is sent to keep a stream open."),
    "memory": Option(_bytes, None, "Memory for all models. The least recently used models are unloaded to stay below "
                     "it. Default: no limit."),
    "unknown_model": Option(one_of("auto", "refuse", "default"), "auto", "Answer to a request with an unknown model "
                            "name: refuse (an error), default (use the first model), or auto (default if there is "
                            "only one model, else refuse)."),
    "on_failure": Option(one_of("reload", "exit"), "reload", "Reaction to the death of a model's device: reload (load "
                         "the model again), or exit (end the service with an error, for a supervisor to restart it)."),
    "load_adapters": Option(FLAG, False, "Allow requests to load LoRA adapters from this machine's folders, and to "
                            "unload them (/v1/load_lora_adapter)."),
    "strict": Option(FLAG, False, "Refuse unknown fields of a request and settings without effect, instead of ignoring "
                     "them."),
    "reasoning": Option(one_of("separate", "inline"), "separate", "Place of the thinking text: separate (in "
                        "reasoning_content) or inline (in the answer)."),
    "log_file": Option(_any_text, "", "Log file; \"\": standard error."),
    "log_level": Option(one_of("error", "warning", "info", "debug"), "info", "Lowest level that is logged."),
    "log_prompts": Option(FLAG, False, "Also log the texts of prompts."),
    "traces": Option(TEXT, None, "Address of a collector of OpenTelemetry traces (OTLP over HTTP), such as "
                     "http://127.0.0.1:4318. Needs the extra traces. Default: no traces.",
                     ("otlp_traces_endpoint",)),
    "page": Option(FLAG, True, "Serve the chat page, and the page that shows the engine's state (/explore)."),
    "replicas": Option(COUNT, None, "Number of copies of the service behind Ray Serve; each has all models."),
}

MODEL = {
    "path": Option(TEXT, None, "The model: a file, a folder, a known name, or ORG/NAME.", ("model_dir",), "model"),
    "aliases": Option(_texts, (), "Other names that requests may use for the model.", (), "model"),
    "preload": Option(FLAG, None, "Load the model when the service starts. Default: for the first model only.", (),
                      "model"),
    **_of_table(LoadOptions, "load"), **_of_table(EngineOptions, "engine"),
    "decoding_strategy": Option(_strategy, None, "Default decoding strategy of requests: a name, or a table with name "
                                "and settings.", ("decoding",), "prompt"),
    "temperature": Option(Check((int, float), "a number from 0", lambda value: value >= 0), None,
                          "Default temperature of requests.", (), "prompt"),
    "max_tokens": Option(COUNT, None, "Default number of new tokens of requests. Default: up to the context.", (),
                         "prompt"),
    "prompt_template": Option(TEXT, None, "Template in Inferflow's notation, or the name of one of "
                              "[prompt_templates].", ("decoder_input_template",), "prompt"),
    "encoder_template": Option(TEXT, None, "Template of the encoder's input, in the same notation.",
                               ("encoder_input_template",), "prompt"),
    "system_prompt": Option(_any_text, "", "System message of conversations without one.", (), "prompt"),
    "chat_template": Option(_file, None, "File with a Jinja chat template, instead of the model's own.", (), "prompt"),
    "overflow": Option(one_of(*POLICIES), "refuse", "Conversations longer than the context: refuse (an error), drop "
                       "(remove the oldest turns), or shift (drop, and continue answers that fill the context). A "
                       "request may override it.", (), "prompt"),
    "tool_format": Option(_tool_format, None, "Format of the model's tool calls (see Tools). Default: detected from "
                          "the chat template, else plain_json.", (), "prompt"),
}
