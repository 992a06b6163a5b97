"""Store of the latest responses, limited in number and size, for requests that continue or reference them."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the items of the conversation before it. size: bytes of their JSON."""

    response: dict[str, Any]
    before: tuple[dict[str, Any], ...]
    size: int

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """All items of the conversation, the response's output included."""
        return (*self.before, *self.response["output"])


class PassedResponses:
    """A stand-in for the store in a replica, since the store is in the front process: the stored response and items
    that one request refers to, and the response that it makes, which is sent back to the front.

    keeps: whether the store keeps responses. before: the response that the request continues, or None. items: by id.
    """

    def __init__(self, keeps: bool, before: StoredResponse | None = None,
                 items: Mapping[str, dict[str, Any]] | None = None):
        self.keeps, self._before, self._items = keeps, before, items or {}
        self._made: StoredResponse | None = None

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep the response that the request has made."""
        self._made = stored

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The response that the request continues. The front has checked its owner."""
        return self._before if self._before is not None and self._before.response["id"] == id else None

    def item(self, owner: str, id: str) -> dict[str, Any] | None:
        """A stored item that the request refers to."""
        return self._items.get(id)

    def take(self) -> StoredResponse | None:
        """The response made since the last call, or None."""
        made, self._made = self._made, None
        return made


class ResponseStore:
    """Stored responses by owner and id; thread-safe.

    most: largest number of responses; 0: none. most_bytes: largest number of bytes of their JSON.
    """

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes = most, most_bytes
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._holders: dict[tuple[str, str], str] = {}  # (owner, item id) -> id of the latest response with the item
        self._size, self._lock = 0, Lock()

    @property
    def keeps(self) -> bool:
        """Whether responses are stored."""
        return self._most > 0

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response; the least recently used responses are dropped."""
        with self._lock:
            self._found[owner, stored.response["id"]] = stored
            self._size += stored.size
            self._holders |= {(owner, item["id"]): stored.response["id"] for item in stored.items}
            while self._found and (len(self._found) > self._most or self._size > self._most_bytes):
                self._drop(*next(iter(self._found)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """A response of this owner; None if it is not stored."""
        with self._lock:
            found = self._found.get((owner, id))
            if found is not None:
                self._found.move_to_end((owner, id))
            return found

    def delete(self, owner: str, id: str) -> bool:
        """Delete a response; return whether it was stored."""
        with self._lock:
            return (owner, id) in self._found and self._drop(owner, id)

    def item(self, owner: str, id: str) -> dict[str, Any] | None:
        """An item of this owner's responses by its id; None if it is not stored."""
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
