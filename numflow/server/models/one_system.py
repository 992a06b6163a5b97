"""Conversations for templates that refuse what agent programs send: several system messages, ones between other turns,
or two messages of the user in a row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SYSTEM = ("system", "developer")


def folded(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The conversation with all its text in fewer messages: one system message, at the beginning; then none at all."""
    first = next((at for at, one in enumerate(messages) if one["role"] not in SYSTEM), len(messages))
    told = [one["content"] for one in messages[:first]]
    if told:
        yield [{"role": "system", "content": "\n\n".join(told)}, *_joined([], messages[first:])]
    yield _joined(told, messages[first:])


def _joined(told: list[str], messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of which no two of the user stand in a row. System messages, and texts that come before all, are part of
    the user's message before them, else of the next one."""
    found: list[Mapping[str, Any]] = []
    waiting = list(told)
    for message in messages:
        asks = found and found[-1]["role"] == "user"
        if message["role"] in SYSTEM and not asks:
            waiting.append(message["content"])
        elif asks and message["role"] in ("user", *SYSTEM):
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        elif message["role"] == "user" and waiting:
            found.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            found.append(message)
    return [*found, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else found
