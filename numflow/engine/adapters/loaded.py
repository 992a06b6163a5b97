"""Adapters of a loaded model that requests choose by name; loaded and unloaded at any time."""

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from numflow.engine.adapters.given import GivenAdapter
from numflow.engine.request.adapter import ChosenAdapter
from numflow.engine.runner.runner import Runner
from numflow.errors import RequestError, did_you_mean, option, quoted
from numflow.executor.contract import ADAPT
from numflow.formats.adapter import open_adapter
from numflow.formats.checkpoint import Checkpoint
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.steps import parts_of
from numflow.registry.progress import reporter
from numflow.spec.reader import Spec

MOST = 256  # maximum number of adapters


class Adapters(Mapping[str, ChosenAdapter]):
    """Adapters by name.

    An unloaded adapter stays in memory until the last request that uses it has ended; meanwhile its name may be reused.
    """

    def __init__(self, runner: Runner, checkpoint: Checkpoint, spec: Spec, offline: bool = False,
                 progress: bool = True):
        """offline, progress: for adapters of the hub.

        Raises: RequestError: the program cannot run several adapters in one batch."""
        if ADAPT not in runner.program.can:
            raise RequestError(f"{option('adapters')}: this program cannot run adapters beside one another; merge "
                               f"one instead ({option('merge')})")
        self._runner, self._checkpoint, self._spec = runner, checkpoint, spec
        self._offline, self._progress = offline, progress
        self._named: dict[str, ChosenAdapter] = {}
        self._alive: weakref.WeakSet[ChosenAdapter] = weakref.WeakSet()
        self._filled: set[int] = set()  # indices for which the program has matrices
        self._serials, self._lock = itertools.count(), threading.Lock()

    def __getitem__(self, name: str) -> ChosenAdapter:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def find(self, name: Any) -> ChosenAdapter:
        """The adapter of a name, for a request.

        Raises:
            RequestError: there is no adapter of this name.
        """
        found = self._named.get(name) if isinstance(name, str) else None
        if found is None:
            raise RequestError(f"there is no adapter {quoted(name)}{did_you_mean(str(name), self._named)}",
                               "adapter_not_found", "adapter")
        return found

    def load(self, name: str, adapter: Any, fetch: bool = True, in_place: bool = False) -> None:
        """Load an adapter for requests: a folder or file, or (folder, scale). fetch: whether to fetch it from the hub.

        in_place: may replace an adapter of this name, which stays if the new one cannot be loaded.

        Raises:
            RequestError: the name is taken, or a part of the adapter cannot be limited to one request.
            ModelNotFoundError, FormatError: the adapter is missing, damaged, or for another model.
        """
        given = GivenAdapter.of(adapter, f"{option('adapters')}[{name!r}]").found(self._offline or not fetch,
                                                                                  self._progress)
        with self._lock:
            if name in self._named and not in_place:
                raise RequestError(f"there is an adapter {quoted(name)} already: unload it first", "adapter_exists")
            if len({*self._named, name}) > MOST:
                raise RequestError(f"there are {MOST} adapters already, as many as may be")
            fit = fitted(open_adapter(given.path), self._checkpoint, self._spec)
            if fit.adapter.invocation and (not self._runner.causal or self._runner.has_encoder):
                raise RequestError(f"{given.path}: an adapter with invocation tokens is for decoders only")
            parts = parts_of(self._runner.network, self._checkpoint, fit, given.scale, self._runner.program.shares)
            if fit.left_out:
                with closing(reporter(self._progress)) as reports:
                    reports.note(fit.without())
            with self._runner.lock:
                self._free_unused()
                taken = {adapter.number for adapter in self._alive}
                number = next(number for number in itertools.count() if number not in taken)
                self._runner.program.set_adapter(number, parts)
                self._filled.add(number)
            self._named[name] = found = ChosenAdapter(name, str(given.path), given.scale, number, next(self._serials),
                                                      fit.adapter.invocation)
            self._alive.add(found)
            if in_place:
                with self._runner.lock:
                    self._free_unused()

    def unload(self, name: str) -> None:
        """Unload an adapter; requests that use it continue to their end.

        Raises:
            RequestError: there is no adapter of this name.
        """
        with self._lock:
            self.find(name)
            del self._named[name]
            with self._runner.lock:
                self._free_unused()

    def _free_unused(self) -> None:
        """Free the matrices of adapters that no request uses any more."""
        for number in self._filled - {adapter.number for adapter in self._alive}:
            self._runner.program.set_adapter(number, None)
            self._filled.discard(number)
