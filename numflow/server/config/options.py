"""The options of the service's configuration file, each in one place: name, type, default, what Inferflow calls it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numflow.engine.request.budget import Budget
from numflow.errors import RequestError
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


def _a(kind: type | tuple[type, ...], wanted: str, good: Callable[[Any], bool] = lambda value: True):
    def read(value, name):
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or not good(value):
            raise RequestError(f"{name} should be {wanted}, is {value!r:.80}")
        return value
    return read


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


def _devices(value, name):
    return _text(str(value) if isinstance(value, int) and not isinstance(value, bool) else value, name)


def _strategy(value, name):
    if not isinstance(value, (str, dict)):
        raise RequestError(f"{name} should be a strategy's name, or a table of its settings, is {value!r:.80}")
    return value


def _tool_format(value, name):
    try:
        find_format(None, _text(value, name))
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    return value


def _file(value, name):
    if not Path(_text(value, name)).is_file():
        raise RequestError(f"{name}: there is no file {value}")
    return value


def _one_of(*known: str):
    return _a(str, f"one of {', '.join(known)}", lambda value: value in known)


_text = _a(str, "text", bool)
_any_text = _a(str, "text")
_flag = _a(bool, "true or false")
_count = _a(int, "a whole number from 1", lambda value: value >= 1)
_from_zero = _a(int, "a whole number from 0", lambda value: value >= 0)
_seconds = _a((int, float), "seconds above 0", lambda value: value > 0)
_percent = _a((int, float), "a number 0 .. 100", lambda value: 0 <= value <= 100)

SERVICE = {
    "host": Option(_text, "127.0.0.1", "Address to listen on; 0.0.0.0 is all of this machine's."),
    "port": Option(_a(int, "0 .. 65535", lambda value: 0 <= value <= 65535), 8080, "0: any free one.", ("http_port",)),
    "api_keys": Option(_texts, (), "If given, every route but /health asks for one of them."),
    "cors_origins": Option(_texts, (), "Web pages of these origins may call the service."),
    "allowed_hosts": Option(_texts, (), "Further names that the Host header may have, beside loopback's and "
                            "containers'; without any, all names where the service listens beyond loopback."),
    "max_body": Option(_bytes, 4 * 2**20, "Bytes of a request's body."),
    "max_connections": Option(_count, 1024, "Connections at a time; more get 503."),
    "max_queue": Option(_count, 256, "Requests that may wait; more get 429.", ("max_waiting",)),
    "max_prompt_tokens": Option(_from_zero, 0, "Tokens of a prompt; 0: as the model's context."),
    "max_choices": Option(_count, Budget.max_choices, "Answers of one request: prompts times n (or best_of)."),
    "max_beams": Option(_count, Budget.max_beams, "Beams of one search (num_beams)."),
    "max_logprobs": Option(_from_zero, Budget.max_logprobs, "Alternatives that are told beside a token."),
    "max_breakers": Option(_count, Budget.max_breakers, "Different texts in dry_sequence_breakers."),
    "max_bans": Option(_count, Budget.max_bans, "Entries of banned_tokens, and of stop_token_ids."),
    "max_bias": Option(_count, Budget.max_bias, "Entries of logit_bias."),
    "max_stops": Option(_count, Budget.max_stops, "Stop strings."),
    "max_grammar": Option(_bytes, Budget.max_grammar, "Bytes of a JSON schema, a regular expression or a grammar."),
    "request_timeout": Option(_seconds, 600, "Seconds that a request may take, waiting included."),
    "body_timeout": Option(_seconds, 30, "Seconds for a request to arrive."),
    "write_timeout": Option(_seconds, 60, "Seconds until a client that reads nothing is given up."),
    "drain_timeout": Option(_seconds, 30, "Seconds that running requests have when the service is told to end."),
    "keep_alive": Option(_seconds, 15, "Seconds after which a silent stream gets a comment."),
    "memory": Option(_bytes, None, "Memory for models together; the least recently used ones make room. Default: any."),
    "unknown_model": Option(_one_of("auto", "refuse", "default"), "auto", "What a request for a model of another name "
                            "gets: an error (refuse), the first model (default), or with one model that, and with "
                            "several an error."),
    "on_failure": Option(_one_of("reload", "exit"), "reload", "What becomes of a model whose device has died: it is "
                         "loaded again, or the service ends with an error, for whoever starts it anew."),
    "strict": Option(_flag, False, "Refuse fields that no route knows and settings without effect, instead of leaving "
                     "them out."),
    "reasoning": Option(_one_of("separate", "inline"), "separate", "Thinking text goes to reasoning_content, or stays "
                        "in the answer."),
    "log_file": Option(_any_text, "", "Where the log goes; \"\": standard error."),
    "log_level": Option(_one_of("error", "warning", "info", "debug"), "info", "What is logged."),
    "log_prompts": Option(_flag, False, "Also log texts of prompts."),
    "page": Option(_flag, True, "Serve the chat page."),
    "replicas": Option(_count, None, "Copies of the service behind Ray Serve; each has all models."),
}

MODEL = {
    "path": Option(_text, None, "A file, a folder, a known name, or ORG/NAME.", ("model_dir",), "model"),
    "aliases": Option(_texts, (), "Other names that requests may use.", (), "model"),
    "preload": Option(_flag, None, "Load when the service starts; default: the first model only.", (), "model"),
    "spec": Option(_text, None, "Specification: a file or a name.", ("model_specification_file", "model_spec_file"),
                   "load"),
    "backend": Option(_text, "cpu", "cpu, reference, cuda.", ("device",), "load"),
    "devices": Option(_devices, None, "Devices and how layers are split: 0;1 by layer, 0&1 by tensor, 0&1;2&3 both.",
                      (), "load"),
    "threads": Option(_count, None, "CPU threads.", ("cpu_threads",), "load"),
    "activations": Option(_text, "int8", "int8, int16 or f32.", (), "load"),
    "transport": Option(_text, None, "Between devices: threads, processes (on the CPU) or ray.", (), "load"),
    "weights": Option(_text, None, "Quantise while loading: a scheme, a preset or a recipe file.",
                      ("device_weight_data_type",), "load"),
    "imatrix": Option(_text, None, "With weights: a calibration file.", (), "load"),
    "draft": Option(_text, None, "A smaller model that guesses tokens.", (), "load"),
    "kv": Option(_text, None, "Type of the keys and values.", ("device_kv_cache_data_type",), "load"),
    "kv_k": Option(_text, None, "Of the keys alone.", (), "load"),
    "kv_v": Option(_text, None, "Of the values alone.", (), "load"),
    "host_kv_percent": Option(_percent, None, "Share of layers whose keys and values stay in the host's memory.",
                              ("host_kv_cache_percent",), "load"),
    "host_embeddings": Option(_flag, None, "Keep the table of tokens in the host's memory.", (), "load"),
    "cpu_layers": Option(_a(int, "a whole number"), None, "With cuda: layers that the processor runs, the first ones; "
                         "below 0: the last ones.", (), "load"),
    "collectives": Option(_text, None, "With cuda, how the GPUs of a group sum: copies, nccl, or auto: nccl where it "
                          "can be.", (), "load"),
    "context": Option(_count, None, "Longest text in tokens.", ("max_context_len",), "load"),
    "chunk": Option(_count, None, "Rows of a prompt that run at once.", (), "load"),
    "max_batch": Option(_count, None, "Sequences that run side by side.", ("max_concurrent_queries",), "engine"),
    "kv_memory": Option(_bytes, None, "Memory for keys and values; default: what leaves the machine usable.", (),
                        "engine"),
    "max_step_tokens": Option(_count, None, "Tokens of one step; longer prompts are cut.", (), "engine"),
    "preemption": Option(_one_of("swap", "recompute"), None, "When memory runs out: swap or recompute.", (), "engine"),
    "prefix_cache": Option(_flag, None, "Keep keys and values of texts that may come again.", (), "engine"),
    "decoding_strategy": Option(_strategy, None, "Strategy of requests that name none: a name, or a table with name "
                                "and settings.", ("decoding",), "prompt"),
    "temperature": Option(_a((int, float), "a number from 0", lambda value: value >= 0), None,
                          "Of requests that give none.", (), "prompt"),
    "max_tokens": Option(_count, None, "New tokens of requests that give no limit; default: up to the context.", (),
                         "prompt"),
    "prompt_template": Option(_text, None, "Template in Inferflow's notation, or the name of one of "
                              "[prompt_templates].", ("decoder_input_template",), "prompt"),
    "encoder_template": Option(_text, None, "The same for what an encoder reads.", ("encoder_input_template",),
                               "prompt"),
    "system_prompt": Option(_any_text, "", "Of conversations that have none.", (), "prompt"),
    "chat_template": Option(_file, None, "File with a Jinja chat template, instead of the model's own.", (), "prompt"),
    "tool_format": Option(_tool_format, None, "How the model writes tool calls (see Tools); default: seen from its "
                          "chat template, else plain_json.", (), "prompt"),
}
