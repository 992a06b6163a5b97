"""Conversations that are longer than the context: dropping of the oldest turns (option overflow)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from numflow.errors import RequestError

POLICIES = ("refuse", "drop", "shift")
Ids = TypeVar("Ids", bound=Sequence[int])
Messages = Sequence[Mapping[str, Any]]


def turns(messages: Messages) -> list[int]:
    """Indices of the messages that begin a turn: the first one after leading system messages, and each user message."""
    first = next((index for index, one in enumerate(messages) if one["role"] not in ("system", "developer")),
                 len(messages))
    return [index for index in range(first, len(messages)) if index == first or messages[index]["role"] == "user"]


def fitting(messages: Messages, ids_of: Callable[[Messages], Ids], most: int, answer: int | None) -> tuple[Ids, int]:
    """Token ids of a conversation, and the number of dropped turns: 0 if it fits, else enough to leave room for an
    answer. The last turn is never dropped.

    most: largest number of prompt tokens. answer: largest number of tokens of the answer; None: unknown.

    Raises:
        RequestError: the last turn alone is far too long.
    """
    begins = turns(messages)

    def rendered(dropped: int) -> Ids | None:
        shortened = messages if not dropped else [*messages[:begins[0]], *messages[begins[dropped]:]]
        try:
            return ids_of(shortened)
        except RequestError as error:
            if error.code != "context_length_exceeded" or dropped + 1 >= len(begins):
                raise
            return None

    ids = rendered(0)
    if ids is not None and len(ids) <= most:
        return ids, 0
    room = most - min(most // 4 if answer is None or answer < 0 else answer, most // 2)
    least, last = 1, len(begins) - 1  # a longer text never has fewer tokens
    while least < last:
        middle = (least + last) // 2
        found = rendered(middle)
        least, last = (least, middle) if found is not None and len(found) <= room else (middle + 1, last)
    if last < 1:
        return (ids if ids is not None else ids_of(messages)), 0
    found = rendered(last)
    assert found is not None
    return found, last
