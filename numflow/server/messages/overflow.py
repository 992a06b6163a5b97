"""Conversations that are longer than the context: the oldest turns are dropped, where that is asked for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from numflow.errors import RequestError

POLICIES = ("refuse", "drop", "shift")
Ids = TypeVar("Ids", bound=Sequence[int])
Messages = Sequence[Mapping[str, Any]]


def turns(messages: Messages) -> list[int]:
    """Beginnings of turns: behind the leading system messages, and with each further question."""
    first = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    return [at for at in range(first, len(messages)) if at == first or messages[at]["role"] == "user"]


def fitting(messages: Messages, ids_of: Callable[[Messages], Ids], most: int, answer: int | None) -> tuple[Ids, int]:
    """Ids of a conversation, and how many of its oldest turns were dropped: none where it fits, else as many as leave
    room for an answer too, but never the last.

    most: tokens of a prompt. answer: tokens that the answer may have; None: nobody knows.

    Raises:
        RequestError: the last turn alone is far too long.
    """
    begins = turns(messages)

    def rendered(dropped: int) -> Ids | None:
        kept = messages if not dropped else [*messages[:begins[0]], *messages[begins[dropped]:]]
        try:
            return ids_of(kept)
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
