"""The adapter that a request has chosen, of those that its model has."""

from dataclasses import dataclass
from typing import NoReturn

from numflow.errors import RequestError, option


@dataclass(eq=False)
class ChosenAdapter:
    """An adapter of a loaded model. Its number is no other's as long as a request has this object.

    number: in batches. serial: that no other adapter of the model has, or has had.
    """

    name: str
    path: str
    scale: float
    number: int
    serial: int


def without_adapters(name: str) -> NoReturn:
    """Refuse an adapter's name.

    Raises:
        RequestError: the model has been loaded without adapters.
    """
    raise RequestError(f"{option('adapter', name)}: the model was loaded without adapters that requests may choose "
                       f"({option('adapters')})", "unsupported", "adapter")
