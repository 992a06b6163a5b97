"""Models by name: sources and local storage."""

from numflow.registry.catalogue import KnownModel, default_model, find, known, shipped_model
from numflow.registry.store import adapter, installed, pull, reachable, remove, resolve, sampling, token_ids

__all__ = ["KnownModel", "adapter", "default_model", "find", "installed", "known", "pull", "reachable", "remove",
           "resolve", "sampling", "shipped_model", "token_ids"]
