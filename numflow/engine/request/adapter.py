"""Adapter of a request, chosen from those of its model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from numflow.engine.schedule.prefix import AdapterStart
from numflow.engine.schedule.sequence import NO_ADAPTER
from numflow.errors import RequestError, option


@dataclass(eq=False)
class ChosenAdapter:
    """An adapter of a loaded model. `number` is not reused as long as a request holds this object.

    number: index in batches. serial: unique over all adapters that the model has or had. invocation: as of Adapter.
    """

    name: str
    path: str
    scale: float
    number: int
    serial: int
    invocation: tuple[int, ...] = ()


class TextAdapter(NamedTuple):
    """An adapter on one text.

    number: index in batches, NO_ADAPTER without an effect. start: the first token with an effect; None: all tokens.
    serials: what the root of the text in the prefix cache has beside the base's: texts share keys and values only if
    they have the same adapter.
    """

    number: int
    start: AdapterStart | None = None
    serials: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """Position of the first token on which the adapter has an effect."""
        return self.start.position if self.start else 0


def text_adapter(adapter: ChosenAdapter | None, ids: Sequence[int] | np.ndarray) -> TextAdapter:
    """An adapter on a text that begins with ids. Invocation tokens start it where they occur last in ids; if they do
    not occur, it has no effect."""
    if adapter is None:
        return TextAdapter(NO_ADAPTER)
    if not adapter.invocation:
        return TextAdapter(adapter.number, serials=(adapter.serial,))
    position = _last(np.asarray(ids), np.asarray(adapter.invocation))
    if position is None:
        return TextAdapter(NO_ADAPTER)
    return TextAdapter(adapter.number, AdapterStart(position, adapter.serial))


def _last(ids: np.ndarray, wanted: np.ndarray) -> int | None:
    """Position of the last occurrence of `wanted` in ids, None if there is none."""
    if len(ids) < len(wanted):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
    found = np.flatnonzero((windows == wanted).all(axis=1))
    return int(found[-1]) if found.size else None


def without_adapters(name: str) -> NoReturn:
    """Refuse the name of an adapter.

    Raises:
        RequestError: the model was loaded without adapters.
    """
    raise RequestError(f"{option('adapter', name)}: the model was loaded without adapters that requests may choose "
                       f"({option('adapters')})", "unsupported", "adapter")
