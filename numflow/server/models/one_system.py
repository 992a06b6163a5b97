"""Rewriting of conversations for templates that refuse what agent programs send: several system messages, system
messages between other turns, or two user messages in a row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SYSTEM = ("system", "developer")


def folded(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Versions of the conversation with the same text in fewer messages: with one system message at the beginning, then
    without system messages."""
    first = next((index for index, one in enumerate(messages) if one["role"] not in SYSTEM), len(messages))
    system = [one["content"] for one in messages[:first]]
    if system:
        yield [{"role": "system", "content": "\n\n".join(system)}, *_joined([], messages[first:])]
    yield _joined(system, messages[first:])


def _joined(system: list[str], messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages without two user messages in a row. System messages are appended to the user message before them, or
    else put before the next one; `system` are the texts of leading system messages."""
    found: list[Mapping[str, Any]] = []
    waiting = list(system)
    for message in messages:
        after_user = found and found[-1]["role"] == "user"
        if message["role"] in SYSTEM and not after_user:
            waiting.append(message["content"])
        elif after_user and message["role"] in ("user", *SYSTEM):
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        elif message["role"] == "user" and waiting:
            found.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            found.append(message)
    return [*found, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else found
