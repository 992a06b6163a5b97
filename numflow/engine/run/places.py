"""Places of an engine's texts: each remembers the text that it had last, so that it can be saved, or forgotten."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from numflow.errors import RequestError


@dataclass(frozen=True)
class KeptText:
    """A text that has run. root: below which the prefix cache has it. ids: int32 [n]."""

    root: Hashable
    ids: np.ndarray

    def begins(self, other: "KeptText") -> bool:
        """Whether the other text goes on where this one ends."""
        return self.root == other.root and len(self.ids) <= len(other.ids) \
            and bool(np.array_equal(self.ids, other.ids[:len(self.ids)]))


class Places:
    """The last texts of so many places, of which the one that was used least recently is given to a new text."""

    def __init__(self, count: int):
        self._texts: list[KeptText | None] = [None] * count
        self._order = list(range(count))  # least recently used first

    def __len__(self) -> int:
        return len(self._texts)

    def check(self, place: int) -> int:
        """The same number.

        Raises:
            RequestError: there is no such place.
        """
        if not 0 <= place < len(self):
            raise RequestError(f"there is no slot {place}: they are 0 .. {len(self) - 1}", param="id_slot")
        return place

    def text(self, place: int) -> KeptText | None:
        """The text of a place, if it has any."""
        return self._texts[self.check(place)]

    def put(self, root: Hashable, ids: Sequence[int], place: int | None = None) -> None:
        """Remember a text: in `place`, or where it goes on, or in the place that was used least recently."""
        new = KeptText(root, np.array(ids, np.int32))
        if place is None:
            begun = [(len(old.ids), at) for at, old in enumerate(self._texts) if old is not None and old.begins(new)]
            place = max(begun)[1] if begun else self._order[0]
        self._texts[self.check(place)] = new
        self._used(place)

    def forget(self, place: int) -> None:
        """Remember no text there; the place is the next to be taken."""
        self._texts[self.check(place)] = None
        self._order.remove(place)
        self._order.insert(0, place)

    def _used(self, place: int) -> None:
        self._order.remove(place)
        self._order.append(place)
