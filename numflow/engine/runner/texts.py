"""Texts to read, as plain arrays, and groups of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

BATCH_ROWS = 512  # tokens of all texts of a batch; a longer text runs alone


class Ids(Protocol):
    """Whatever has ids i32 [n]."""

    @property
    def ids(self) -> np.ndarray: ...


T = TypeVar("T", bound=Ids)


class Text(NamedTuple):
    """ids i32 [n]; types i32 [n] token types, None for zeros; encoder_ids i32 [m] where there is an encoder."""

    ids: np.ndarray
    types: np.ndarray | None = None
    encoder_ids: np.ndarray | None = None


def groups(texts: Iterable[T], limit: int) -> Iterator[Sequence[T]]:
    """Runs of texts that have `limit` tokens at most; a longer text is a group of its own."""
    group: list[T] = []
    for text in texts:
        if group and sum(len(other.ids) for other in group) + len(text.ids) > limit:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
