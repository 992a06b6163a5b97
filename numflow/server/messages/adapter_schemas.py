"""Bodies of the routes that load and unload adapters, with the names that other services have for them."""

from typing import Annotated

from pydantic import Field

from numflow.server.messages.schemas import Strict

Name = Annotated[str, Field(min_length=1, max_length=200)]


class LoadAdapterRequest(Strict):
    """lora_path: a folder or file where the service runs, or ORG/NAME that it has fetched.

    scale: of the adapter's own factor. model: the base.

    load_inplace: in place of an adapter of that name."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1)]
    scale: float = 1.0
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(Strict):
    """model: the base."""

    lora_name: Name
    model: str | None = None
