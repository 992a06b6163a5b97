"""Slots of an engine: each keeps the text that ran in it last, so that the text can be saved or erased."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from numflow.engine.schedule.prefix import AdapterStart
from numflow.errors import RequestError


@dataclass(frozen=True)
class SlotText:
    """A text that has run. root: its root in the prefix cache. ids: int32 [n]. start: as of SequenceGroup."""

    root: Hashable
    ids: np.ndarray
    start: AdapterStart | None = None

    def is_prefix_of(self, other: "SlotText") -> bool:
        """Whether this text is a prefix of the other text."""
        return (self.root, self.start) == (other.root, other.start) and len(self.ids) <= len(other.ids) \
            and bool(np.array_equal(self.ids, other.ids[:len(self.ids)]))


class TextSlots:
    """The last texts of `count` slots. A new text takes the least recently used slot."""

    def __init__(self, count: int):
        self._texts: list[SlotText | None] = [None] * count
        self._order = list(range(count))  # least recently used first

    def __len__(self) -> int:
        return len(self._texts)

    def check(self, slot: int) -> int:
        """Check the number of a slot and return it.

        Raises:
            RequestError: there is no such slot.
        """
        if not 0 <= slot < len(self):
            raise RequestError(f"there is no slot {slot}: they are 0 .. {len(self) - 1}", param="id_slot")
        return slot

    def text(self, slot: int) -> SlotText | None:
        """Text of a slot, None if it is empty."""
        return self._texts[self.check(slot)]

    def put(self, root: Hashable, ids: Sequence[int], slot: int | None = None,
            start: AdapterStart | None = None) -> None:
        """Store a text in `slot`, or in the slot whose text it continues, or in the least recently used slot."""
        new = SlotText(root, np.array(ids, np.int32), start)
        if slot is None:
            continued = [(len(old.ids), index) for index, old in enumerate(self._texts)
                         if old is not None and old.is_prefix_of(new)]
            slot = max(continued)[1] if continued else self._order[0]
        self._texts[self.check(slot)] = new
        self._used(slot)

    def forget(self, slot: int) -> None:
        """Empty a slot; it is the next to be taken."""
        self._texts[self.check(slot)] = None
        self._order.remove(slot)
        self._order.insert(0, slot)

    def _used(self, slot: int) -> None:
        self._order.remove(slot)
        self._order.append(slot)
