"""Texts to read, as plain arrays, and groups of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

BATCH_ROWS = 512  # tokens of all texts of a batch; a longer text runs alone


class Text(NamedTuple):
    """ids i32 [n]; types i32 [n] token types, None for zeros; encoder_ids i32 [m] where there is an encoder."""

    ids: np.ndarray
    types: np.ndarray | None = None
    encoder_ids: np.ndarray | None = None


def groups(texts: Iterable[Text], limit: int) -> Iterator[Sequence[Text]]:
    """Runs of texts that have `limit` tokens at most; a longer text is a group of its own."""
    group: list[Text] = []
    for text in texts:
        if group and sum(len(other.ids) for other in group) + len(text.ids) > limit:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
