"""Special tokens around a text: [CLS] A [SEP] B [SEP] and the like."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from numflow.errors import TokenizerError

TEXT, SECOND = "A", "B"
TYPES = 256  # maximum token types; models have up to 4


Slot = tuple[int | str, int]


@dataclass(frozen=True)
class Wrapping:
    """Slots in order, each (content, type id); the content is a token id, or TEXT or SECOND for the ids of a text."""

    single: tuple[Slot, ...] = ((TEXT, 0),)
    pair: tuple[Slot, ...] = ((TEXT, 0), (SECOND, 0))

    @property
    def prefix(self) -> list[int]:
        """Ids before a single text."""
        before = takewhile(lambda content: content != TEXT, (content for content, _ in self.single))
        return [content for content in before if isinstance(content, int)]

    def apply(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Token ids and type ids of one text or two."""
        ids: list[int] = []
        types: list[int] = []
        for content, type_id in self.single if second is None else self.pair:
            part = [content] if isinstance(content, int) else first if content == TEXT else second or ()
            ids += part
            types += [type_id] * len(part)
        return ids, types

    def changed(self, bos: int | None, eos: int | None, add_bos: bool | None, add_eos: bool | None) -> "Wrapping":
        """Copy with BOS added or removed at the start, and EOS at the end; None: unchanged."""

        def change(slots):
            if bos is not None and add_bos is not None:
                slots = slots[1:] if slots[0][0] == bos else slots
                slots = ((bos, 0), *slots) if add_bos else slots
            if eos is not None and add_eos is not None:
                slots = slots[:-1] if slots[-1][0] == eos else slots
                slots = (*slots, (eos, slots[-1][1])) if add_eos else slots
            return slots

        return Wrapping(change(self.single), change(self.pair))


def around(bos: int | None = None, eos: int | None = None, between: Sequence[int] = (),
           second_type: int = 0) -> Wrapping:
    """bos A eos, and for two texts bos A `between` B eos."""
    start = ((bos, 0),) if bos is not None else ()
    end = (eos,) if eos is not None else ()
    return Wrapping(
        (*start, (TEXT, 0), *((id, 0) for id in end)),
        (*start, (TEXT, 0), *((id, 0) for id in between), (SECOND, second_type), *((id, second_type) for id in end)),
    )


def each(bos: int | None, eos: int | None) -> Wrapping:
    """bos A eos, and for two texts bos A eos bos B eos."""

    def one(text: str, type_id: int) -> tuple[Slot, ...]:
        slots: list[Slot] = [(content, type_id) for content in (bos, text, eos) if content is not None]
        return tuple(slots)

    return Wrapping(one(TEXT, 0), one(TEXT, 0) + one(SECOND, 1))


def of_library(library: Any, where: str) -> Wrapping:
    """Wrapping of a `tokenizers.Tokenizer`, derived from an encoded probe, so that every post-processor is supported.

    Raises:
        TokenizerError: a token type out of range.
    """
    if not (probe := _probe(library)):
        return Wrapping()
    single, pair = _slots(library.encode(probe)), _slots(library.encode(probe, probe))
    if (most := max(type_id for _, type_id in (*single, *pair))) >= TYPES:
        raise TokenizerError(f"{where}: post_processor: expected types below {TYPES}, found {most}")
    return Wrapping(single, pair)


def _probe(library: Any) -> str:
    """A text that becomes at least one token."""
    for text in ("a", "A", "0", "\n", "."):
        if library.encode(text, add_special_tokens=False).ids:
            return text
    return ""


def _slots(encoding: Any) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for id, type_id, sequence in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
        content = id if sequence is None else (TEXT, SECOND)[sequence]
        if isinstance(content, int) or (content, type_id) not in slots:
            slots.append((content, type_id))
    return tuple(slots)
