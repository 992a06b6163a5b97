"""Texts as plain arrays, and groups of texts for a batch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from numflow.engine.request.adapter import ChosenAdapter
from numflow.errors import RequestError
from numflow.ops import Network

BATCH_ROWS = 512  # maximum tokens of all texts of a batch; a longer text runs alone


class Ids(Protocol):
    """Object with ids i32 [n]."""

    @property
    def ids(self) -> np.ndarray: ...


T = TypeVar("T", bound=Ids)


class Text(NamedTuple):
    """ids i32 [n]; types i32 [n]: token types, None for zeros; encoder_ids i32 [m]: text of the encoder, if any;
    adapter: adapter of the text, None for the base model alone."""

    ids: np.ndarray
    types: np.ndarray | None = None
    encoder_ids: np.ndarray | None = None
    adapter: ChosenAdapter | None = None


def types_of(network: Network, ids: np.ndarray, given: Sequence[int] | None) -> np.ndarray | None:
    """Token types of a text, i32 [n]; None if not given.

    Raises:
        RequestError: the model has no token types, or the given ones have a wrong length or are out of range.
    """
    if given is None:
        return None
    tables = [step.weights["table"] for step in network.entries["main"] if step.op == "embed_type"]
    if not tables:
        raise RequestError(f"{network.name} has no token types")
    types, count = np.asarray(given), network.weights[tables[0]].shape[0]
    if types.shape != ids.shape or types.dtype.kind not in "iu" or np.any((types < 0) | (types >= count)):
        raise RequestError(f"token_type_ids should be {len(ids)} whole numbers 0 .. {count - 1}")
    return types.astype(np.int32)


def groups(texts: Iterable[T], limit: int) -> Iterator[Sequence[T]]:
    """Group consecutive texts up to `limit` tokens in total; a longer text is a group alone."""
    group: list[T] = []
    for text in texts:
        if group and sum(len(other.ids) for other in group) + len(text.ids) > limit:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
