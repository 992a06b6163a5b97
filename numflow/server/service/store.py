"""Responses that clients may come back to: the latest ones, within a number and a size."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class StoredResponse:
    """A response as it was answered, and the items of its conversation: those before the answer, then the answer's."""

    response: dict[str, Any]
    before: tuple[dict[str, Any], ...]
    size: int

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The whole conversation."""
        return (*self.before, *self.response["output"])


class PassedResponses:
    """In the place of a store where another process has it: of one request the response that it goes on from, the items
    that it refers to, and the response that it makes, which whoever has the store takes from here.

    keeps: whether the store keeps anything. before: None if the request names none that is stored. items: by their ids.
    """

    def __init__(self, keeps: bool, before: StoredResponse | None = None,
                 items: Mapping[str, dict[str, Any]] | None = None):
        self.keeps, self._before, self._items = keeps, before, items or {}
        self._made: StoredResponse | None = None

    def put(self, owner: str, stored: StoredResponse) -> None:
        """The response that the request makes."""
        self._made = stored

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The response before; the store has looked at its owner."""
        return self._before if self._before is not None and self._before.response["id"] == id else None

    def item(self, owner: str, id: str) -> dict[str, Any] | None:
        """An item that the request refers to."""
        return self._items.get(id)

    def take(self) -> StoredResponse | None:
        """The response that was made since the last call."""
        made, self._made = self._made, None
        return made


class ResponseStore:
    """Stored responses by owner and id. Used by several threads.

    most: how many are kept; 0: none. most_bytes: bytes of their JSON texts together.
    """

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes = most, most_bytes
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._holders: dict[tuple[str, str], str] = {}  # owner and id of an item -> the latest response that has it
        self._size, self._lock = 0, Lock()

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._most > 0

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response; those that were not asked for the longest make room."""
        with self._lock:
            self._found[owner, stored.response["id"]] = stored
            self._size += stored.size
            self._holders |= {(owner, item["id"]): stored.response["id"] for item in stored.items}
            while self._found and (len(self._found) > self._most or self._size > self._most_bytes):
                self._drop(*next(iter(self._found)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """A response of this owner's; None if there is none any more."""
        with self._lock:
            found = self._found.get((owner, id))
            if found is not None:
                self._found.move_to_end((owner, id))
            return found

    def delete(self, owner: str, id: str) -> bool:
        """Whether there was one to forget."""
        with self._lock:
            return (owner, id) in self._found and self._drop(owner, id)

    def item(self, owner: str, id: str) -> dict[str, Any] | None:
        """An item of this owner's responses, by its id; None if there is none any more."""
        with self._lock:
            found = self._found.get((owner, self._holders.get((owner, id), "")))
            return next((item for item in found.items if item["id"] == id), None) if found is not None else None

    def _drop(self, owner: str, id: str) -> bool:
        found = self._found.pop((owner, id))
        self._size -= found.size
        for item in found.items:
            if self._holders.get((owner, item["id"])) == id:
                del self._holders[owner, item["id"]]
        return True
