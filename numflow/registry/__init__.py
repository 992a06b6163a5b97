"""Models by name: where they come from and where they are kept."""

from numflow.registry.catalogue import KnownModel, default_model, find, known
from numflow.registry.store import installed, pull, remove, resolve, sampling, token_ids

__all__ = ["KnownModel", "default_model", "find", "installed", "known", "pull", "remove", "resolve", "sampling",
           "token_ids"]
