"""The options of the service's configuration file, each in one place: name, type, default, what Inferflow calls it."""

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

    read:    makes the value of what the file has, or raises RequestError.
    default: where the file has none.
    aliases: other names it goes by, those of Inferflow's configuration.
    goes:    what it is for: "service", "load" (numflow.load), "engine" (Engine), "prompt", or "model" (the pool).
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
        raise RequestError(f"{name} should be a strategy's name, or a table of its settings, is {value!r:.80}")
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
    """A row for each option of a table of the engine."""
    return {row.name: Option(_READERS.get(found.check, found.check), row.default, found.help_for(in_config),
                             found.aliases, goes) for row, found in rows(table, CONFIG)}


def in_config(name: str, value: str = "") -> str:
    """An option as a configuration file has it."""
    return f"{name} = {value}" if value else name


_any_text = Check(str, "text")
_seconds = Check((int, float), "seconds above 0", lambda value: value > 0)
_port = Check(int, "0 .. 65535", lambda value: 0 <= value <= 65535)
_READERS: dict[Check, Callable[[Any, str], Any]] = {
    SIZE: _bytes, PATH: TEXT, DEVICES: lambda value, name: TEXT(str(value) if type(value) is int else value, name)}

SERVICE = {
    "host": Option(TEXT, "127.0.0.1", "Address to listen on; 0.0.0.0 is all of this machine's."),
    "port": Option(_port, 8080, "0: any free one.", ("http_port",)),
    "api_keys": Option(_texts, (), "If given, every route but /health asks for one of them."),
    "cors_origins": Option(_texts, (), "Web pages of these origins may call the service."),
    "allowed_hosts": Option(_texts, (), "Further names that the Host header may have, beside loopback's and "
                            "containers'; without any, all names where the service listens beyond loopback."),
    "max_body": Option(_bytes, 4 * 2**20, "Bytes of a request's body."),
    "max_connections": Option(COUNT, 1024, "Connections at a time; more get 503."),
    "max_queue": Option(COUNT, 256, "Requests that may wait; more get 429.", ("max_waiting",)),
    "requests_per_minute": Option(FROM_ZERO, 0, "POST requests that each key has in a minute, without keys all clients "
                                  "together; more get 429. 0: any number."),
    "tokens_per_minute": Option(FROM_ZERO, 0, "Tokens of prompts and answers that each key has in a minute; an answer "
                                "may owe some. 0: any number."),
    "tokens_per_day": Option(FROM_ZERO, 0, "The same for a day."),
    "unload_after": Option(FROM_ZERO, 0, "Seconds without requests after which a model is unloaded, to be loaded again "
                           "by the next one; Ollama's keep_alive says otherwise for its model. 0: models stay."),
    "max_prompt_tokens": Option(FROM_ZERO, 0, "Tokens of a prompt; 0: as the model's context."),
    "max_choices": Option(COUNT, Budget.max_choices, "Answers of one request: prompts times n (or best_of)."),
    "max_beams": Option(COUNT, Budget.max_beams, "Beams of one search (num_beams)."),
    "max_logprobs": Option(FROM_ZERO, Budget.max_logprobs, "Alternatives that are told beside a token."),
    "max_breakers": Option(COUNT, Budget.max_breakers, "Different texts in dry_sequence_breakers."),
    "max_bans": Option(COUNT, Budget.max_bans, "Entries of banned_tokens, and of stop_token_ids."),
    "max_bias": Option(COUNT, Budget.max_bias, "Entries of logit_bias."),
    "max_stops": Option(COUNT, Budget.max_stops, "Stop strings."),
    "max_grammar": Option(_bytes, Budget.max_grammar, "Bytes of a JSON schema, a regular expression or a grammar."),
    "max_responses": Option(FROM_ZERO, 1000, "Answers of /v1/responses that are kept, for previous_response_id; 0: "
                            "none."),
    "responses_memory": Option(_bytes, 64 * 2**20, "Bytes of kept answers and their conversations together."),
    "slot_folder": Option(TEXT, None, "Folder of the files that POST /slots/{id} saves and restores, of each key in "
                          "one of its own; without it none are.", ("slot_save_path",)),
    "slot_disk": Option(_bytes, 16 * 2**30, "Bytes of files there, from which on no more are saved."),
    "deletable": Option(FLAG, False, "DELETE /api/delete may delete the files of models that numflow has fetched."),
    "request_timeout": Option(_seconds, 600, "Seconds that a request may take, waiting included."),
    "body_timeout": Option(_seconds, 30, "Seconds for a request to arrive."),
    "write_timeout": Option(_seconds, 60, "Seconds until a client that reads nothing is given up."),
    "drain_timeout": Option(_seconds, 30, "Seconds that running requests have when the service is told to end."),
    "keep_alive": Option(_seconds, 15, "Seconds after which a silent stream gets a comment."),
    "memory": Option(_bytes, None, "Memory for models together; the least recently used ones make room. Default: any."),
    "unknown_model": Option(one_of("auto", "refuse", "default"), "auto", "What a request for a model of another name "
                            "gets: an error (refuse), the first model (default), or with one model that, and with "
                            "several an error."),
    "on_failure": Option(one_of("reload", "exit"), "reload", "What becomes of a model whose device has died: it is "
                         "loaded again, or the service ends with an error, for whoever starts it anew."),
    "load_adapters": Option(FLAG, False, "Adapters may be loaded from this machine's folders, and unloaded, over HTTP "
                            "(/v1/load_lora_adapter)."),
    "strict": Option(FLAG, False, "Refuse fields that no route knows and settings without effect, instead of leaving "
                     "them out."),
    "reasoning": Option(one_of("separate", "inline"), "separate", "Thinking text goes to reasoning_content, or stays "
                        "in the answer."),
    "log_file": Option(_any_text, "", "Where the log goes; \"\": standard error."),
    "log_level": Option(one_of("error", "warning", "info", "debug"), "info", "What is logged."),
    "log_prompts": Option(FLAG, False, "Also log texts of prompts."),
    "traces": Option(TEXT, None, "Address of a collector of OpenTelemetry traces (OTLP over HTTP), such as "
                     "http://127.0.0.1:4318; needs the extra traces. Default: none are made.",
                     ("otlp_traces_endpoint",)),
    "page": Option(FLAG, True, "Serve the chat page, and the page that looks inside the engine."),
    "replicas": Option(COUNT, None, "Copies of the service behind Ray Serve; each has all models."),
}

MODEL = {
    "path": Option(TEXT, None, "A file, a folder, a known name, or ORG/NAME.", ("model_dir",), "model"),
    "aliases": Option(_texts, (), "Other names that requests may use.", (), "model"),
    "preload": Option(FLAG, None, "Load when the service starts; default: the first model only.", (), "model"),
    **_of_table(LoadOptions, "load"), **_of_table(EngineOptions, "engine"),
    "decoding_strategy": Option(_strategy, None, "Strategy of requests that name none: a name, or a table with name "
                                "and settings.", ("decoding",), "prompt"),
    "temperature": Option(Check((int, float), "a number from 0", lambda value: value >= 0), None,
                          "Of requests that give none.", (), "prompt"),
    "max_tokens": Option(COUNT, None, "New tokens of requests that give no limit; default: up to the context.", (),
                         "prompt"),
    "prompt_template": Option(TEXT, None, "Template in Inferflow's notation, or the name of one of "
                              "[prompt_templates].", ("decoder_input_template",), "prompt"),
    "encoder_template": Option(TEXT, None, "The same for what an encoder reads.", ("encoder_input_template",),
                               "prompt"),
    "system_prompt": Option(_any_text, "", "Of conversations that have none.", (), "prompt"),
    "chat_template": Option(_file, None, "File with a Jinja chat template, instead of the model's own.", (), "prompt"),
    "overflow": Option(one_of(*POLICIES), "refuse", "Conversations that the context cannot hold: refuse them, drop "
                       "their oldest turns, or drop them and go on also where an answer fills the context (shift). "
                       "A request may say otherwise.", (), "prompt"),
    "tool_format": Option(_tool_format, None, "How the model writes tool calls (see Tools); default: seen from its "
                          "chat template, else plain_json.", (), "prompt"),
}
