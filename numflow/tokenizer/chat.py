"""Chat templates: Jinja templates of checkpoints, rendered with the functions that published templates use."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from numflow.errors import TokenizerError
from numflow.tokenizer.sandbox import MAX_SIZE, BoundedEnvironment, TooLarge, check_time, start_clock

MAX_TEMPLATE = 1 << 16  # characters; compiling this many takes about a second at most
MAX_FORMAT = 1000  # maximum characters of a date format


def render(template: str, **variables: Any) -> str:
    """Render a chat template with `variables` (messages, add_generation_prompt, bos_token, tools, ...).

    Raises:
        TokenizerError: the template is invalid, refuses the messages, or takes too much time or memory.
    """
    if len(template) > MAX_TEMPLATE:
        raise TokenizerError(f"chat template: longer than {MAX_TEMPLATE} characters")
    pieces: list[str] = []
    total = 0
    try:
        start_clock(variables)
        compiled = _compiled(template)
        check_time()
        for piece in compiled.generate(**variables):
            pieces.append(piece)
            total += len(piece)
            if total > MAX_SIZE:
                raise TooLarge(f"writes more than {MAX_SIZE} characters")
    except RecursionError:
        raise TokenizerError("chat template: nested too deeply") from None
    except Exception as error:  # a template can raise any exception
        message = " ".join(str(error).split())[:300] or type(error).__name__
        line = getattr(error, "lineno", None)
        raise TokenizerError(f"chat template{f', line {line}' if line else ''}: {message}") from None
    return "".join(pieces)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                     extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Filter "tojson": plain JSON; Jinja's own filter escapes for HTML. Written in pieces, as indents may make it
    long."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces, total = [], 0
    for piece in encoder.iterencode(value):
        check_time()
        pieces.append(piece)
        total += len(piece)
        if total > MAX_SIZE:
            raise TooLarge(f"writes more than {MAX_SIZE} characters")
    return "".join(pieces)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > MAX_FORMAT:
        raise TooLarge(f"uses a date format of more than {MAX_FORMAT} characters")
    return datetime.now().strftime(format)


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
