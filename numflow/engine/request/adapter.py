"""Adapter of a request, chosen from those of its model."""

from dataclasses import dataclass
from typing import NoReturn

from numflow.errors import RequestError, option


@dataclass(eq=False)
class ChosenAdapter:
    """An adapter of a loaded model. `number` is not reused as long as a request holds this object.

    number: index in batches. serial: unique over all adapters that the model has or had.
    """

    name: str
    path: str
    scale: float
    number: int
    serial: int


def without_adapters(name: str) -> NoReturn:
    """Refuse the name of an adapter.

    Raises:
        RequestError: the model was loaded without adapters.
    """
    raise RequestError(f"{option('adapter', name)}: the model was loaded without adapters that requests may choose "
                       f"({option('adapters')})", "unsupported", "adapter")
