"""The adapters of a loaded model that requests choose by name: loaded and unloaded at any time."""

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

MOST = 256  # adapters at a time


class Adapters(Mapping[str, ChosenAdapter]):
    """Adapters by name.

    An adapter that is unloaded stays in memory until the last request that has chosen it has ended; meanwhile another
    may have its name.
    """

    def __init__(self, runner: Runner, checkpoint: Checkpoint, spec: Spec, offline: bool = False,
                 progress: bool = True):
        """offline, progress: of adapters of the hub.

        Raises: RequestError: the program cannot run adapters beside one another."""
        if ADAPT not in runner.program.can:
            raise RequestError(f"{option('adapters')}: this program cannot run adapters beside one another; merge "
                               f"one instead ({option('merge')})")
        self._runner, self._checkpoint, self._spec = runner, checkpoint, spec
        self._offline, self._progress = offline, progress
        self._named: dict[str, ChosenAdapter] = {}
        self._alive: weakref.WeakSet[ChosenAdapter] = weakref.WeakSet()
        self._filled: set[int] = set()  # numbers that the program has matrices for
        self._serials, self._lock = itertools.count(), threading.Lock()

    def __getitem__(self, name: str) -> ChosenAdapter:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def find(self, name: Any) -> ChosenAdapter:
        """The adapter of that name, for a request.

        Raises:
            RequestError: there is none.
        """
        found = self._named.get(name) if isinstance(name, str) else None
        if found is None:
            raise RequestError(f"there is no adapter {quoted(name)}{did_you_mean(str(name), self._named)}",
                               "adapter_not_found", "adapter")
        return found

    def load(self, name: str, adapter: Any, fetch: bool = True, in_place: bool = False) -> None:
        """Let requests choose an adapter: a folder or file, or (folder, scale). One of the hub is fetched if it may be.

        in_place: it may take the place of one of that name, which stays where the new one cannot be loaded.

        Raises:
            RequestError: there is one of that name, or some of it cannot be one request's alone.
            ModelNotFoundError, FormatError: it is not there, broken, or for another model.
        """
        given = GivenAdapter.of(adapter, f"{option('adapters')}[{name!r}]").found(self._offline or not fetch,
                                                                                  self._progress)
        with self._lock:
            if name in self._named and not in_place:
                raise RequestError(f"there is an adapter {quoted(name)} already: unload it first", "adapter_exists")
            if len({*self._named, name}) > MOST:
                raise RequestError(f"there are {MOST} adapters already, as many as may be")
            fit = fitted(open_adapter(given.path), self._checkpoint, self._spec)
            parts = parts_of(self._runner.network, self._checkpoint, fit, given.scale, self._runner.program.shares)
            if fit.left_out:
                with closing(reporter(self._progress)) as told:
                    told.note(fit.without())
            with self._runner.lock:
                self._sweep()
                taken = {adapter.number for adapter in self._alive}
                number = next(number for number in itertools.count() if number not in taken)
                self._runner.program.set_adapter(number, parts)
                self._filled.add(number)
            self._named[name] = found = ChosenAdapter(name, str(given.path), given.scale, number, next(self._serials))
            self._alive.add(found)
            if in_place:
                with self._runner.lock:
                    self._sweep()

    def unload(self, name: str) -> None:
        """Let requests choose an adapter no more; those that have it go on to their end.

        Raises:
            RequestError: there is none of that name.
        """
        with self._lock:
            self.find(name)
            del self._named[name]
            with self._runner.lock:
                self._sweep()

    def _sweep(self) -> None:
        """Drop the matrices that nobody has chosen any more."""
        for number in self._filled - {adapter.number for adapter in self._alive}:
            self._runner.program.set_adapter(number, None)
            self._filled.discard(number)
