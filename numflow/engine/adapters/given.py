"""Adapter arguments of callers, and checkpoints with adapters merged.

    adapters={"name": folder}, adapters={"name": (folder, 0.5)}, merge="name", adapter=["FOLDER=0.5"]
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numflow import places, registry
from numflow.errors import RequestError, did_you_mean, option, quoted
from numflow.formats.adapter import open_adapter
from numflow.formats.checkpoint import Checkpoint
from numflow.spec.reader import Spec


@dataclass(frozen=True)
class GivenAdapter:
    """Folder or file of an adapter, and a factor for the adapter's own scale."""

    path: Path
    scale: float = 1.0

    @classmethod
    def of(cls, value: Any, where: str) -> "GivenAdapter":
        """From a path, or (path, scale).

        Raises:
            RequestError: the value is neither.
        """
        path, scale = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 1.0)
        if not (isinstance(path, str) and path) and not hasattr(path, "__fspath__"):
            raise RequestError(f"{where} should be a folder, or (folder, scale), is {quoted(value)}")
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
            raise RequestError(f"{where}: the scale should be a number, is {quoted(scale)}")
        return cls(places.expanded(path), float(scale))

    def found(self, offline: bool = False, progress: bool = True) -> "GivenAdapter":
        """The adapter on disk; an adapter of the hub (ORG/NAME) is fetched if necessary.

        Raises:
            ModelNotFoundError, DownloadError: the hub does not have the adapter.
        """
        return replace(self, path=registry.adapter(self.path, offline, progress))

    @classmethod
    def of_text(cls, text: str) -> "GivenAdapter":
        """From FOLDER or FOLDER=SCALE.

        Raises:
            RequestError: the scale is no number.
        """
        path, equals, scale = text.rpartition("=")
        if not equals or places.expanded(text).exists():
            return cls.of(text, option("adapter"))
        try:
            return cls.of((path, float(scale)), option("adapter", text))
        except ValueError:
            raise RequestError(f"{option('adapter', text)}: the scale should be a number, is {quoted(scale)}") from None


Names = str | Sequence[str] | None  # one name, several, or none


def to_merge(adapters: Mapping[str, Any] | None, merge: Names, texts: Names) -> tuple[GivenAdapter, ...]:
    """Adapters that are merged when a model is loaded, in order: those of `adapters` named by `merge`, and `texts`.
    Requests choose among the other `adapters`.

    Raises:
        RequestError: a name that is not in `adapters`, or a value that is no adapter.
    """
    known, wanted = named(adapters), _listed(merge)
    for name in wanted:
        if name not in known:
            raise RequestError(f"{option('merge')}: there is no adapter {quoted(name)}{did_you_mean(name, known)}")
    return (*(known[name] for name in wanted), *map(GivenAdapter.of_text, _listed(texts)))


def by_request(adapters: Mapping[str, Any] | None, merge: Names) -> dict[str, Any] | None:
    """Adapters that requests choose by name, unchanged; None if the model will never have any."""
    if adapters is None or (adapters and {*_listed(merge)} >= {*adapters}):
        return None
    return {name: value for name, value in adapters.items() if name not in _listed(merge)}


def _listed(names: Names) -> Sequence[str]:
    return [names] if isinstance(names, str) else names or []


def named(adapters: Mapping[str, Any] | None) -> dict[str, GivenAdapter]:
    """Adapters by name, checked.

    Raises:
        RequestError: a name that is no text, or a value that is no adapter.
    """
    for name in adapters or {}:
        if not isinstance(name, str) or not name:
            raise RequestError(f"{option('adapters')}: names should be texts, one is {quoted(name)}")
    return {name: GivenAdapter.of(value, f"{option('adapters')}[{name!r}]") for name, value in (adapters or {}).items()}


def with_adapters(checkpoint: Checkpoint, spec: Spec, given: Iterable[GivenAdapter],
                  note: Callable[[str], None] | None = None) -> Checkpoint:
    """Checkpoint with adapters merged; the same object without adapters. note: see `merged`.

    Raises:
        ModelNotFoundError, FormatError: an adapter is missing, damaged, or for another model.
    """
    opened = [(open_adapter(adapter.path), adapter.scale) for adapter in given]
    if not opened:
        return checkpoint
    from numflow.network.adapters.merge import merged

    return merged(checkpoint, spec, opened, note)


def expanded(before: Checkpoint, after: Checkpoint) -> str:
    """Line about quantised matrices that became float32 by merging, "" if there are none."""
    names = [name for name, tensor in before.tensors.items()
             if tensor.type.block > 1 and after.tensors[name].type is not tensor.type]
    if not names:
        return ""
    nbytes = sum(after.tensors[name].nbytes for name in names)
    return (f"quantised matrices that are float32 now, as an adapter changes them: {len(names)} "
            f"({nbytes / 1e6:.1f} MB); quantising while loading makes them small again")
