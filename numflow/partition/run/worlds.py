"""Meeting point of all devices of a plan: the World of each executor, and mailboxes of the host between them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from numflow.errors import DeviceError
from numflow.mailboxes import Mailboxes
from numflow.ops import Network
from numflow.partition.cut.plan import DevicePart


class Worlds:
    """The Worlds of a plan's executors as one.

    parts:     devices that run here. executors: by name (DevicePart.executor), a module with `Program` and `World`.
    threads:   of each device, for executors that have a say.
    shared:    devices are processes.
    remote:    mailboxes to devices elsewhere; where there are several executors, what they send each other goes through
               mailboxes of this process.

    Raises:
        DeviceError: devices of several executors that are not threads of one process.
    """

    def __init__(self, parts: Sequence[DevicePart], executors: Mapping[str, Any], threads: int | None = None,
                 shared: bool = False, remote: Any = None):
        names = list(dict.fromkeys(part.executor for part in parts))
        if len(names) > 1 and shared:
            raise DeviceError(f"devices run by {' and '.join(names)} are threads of one process: use transport "
                              "'threads'")
        remote = Mailboxes() if remote is None and len(names) > 1 else remote
        self._executors = {name: executors[name] for name in names}
        self._owner = {part.index: part.executor for part in parts}
        self._worlds = {}
        for name, executor in self._executors.items():
            own = [part for part in parts if part.executor == name]
            self._worlds[name] = executor.World({part.index: part.network for part in own}, threads, shared, remote,
                                                names={part.index: part.name for part in own})
        self.threads = {index: count for world in self._worlds.values() for index, count in world.threads.items()}

    def of(self, index: int) -> Any:
        """The World of a device."""
        return self._worlds[self._owner[index]]

    def program(self, index: int) -> Any:
        """The Program class of a device."""
        return self._executors[self._owner[index]].Program

    def options(self, index: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of a plan's options that a device gets: all if there is one executor, else what its Program knows."""
        if len(self._worlds) == 1:
            return options
        known = inspect.signature(self.program(index)).parameters
        return {name: value for name, value in options.items() if name in known}

    def together(self, network: Network, programs: Sequence[Any]) -> Any | None:
        """The object that runs the programs of all devices, parts of `network`, by one call.

        None unless all are of one executor that can (its World.together) and none is elsewhere.
        """
        return None if len(self._worlds) > 1 else next(iter(self._worlds.values())).together(network, programs)

    @property
    def in_pieces(self) -> bool:
        """Whether a long batch may go through in pieces."""
        return all(world.in_pieces for world in self._worlds.values())

    @property
    def progress(self) -> int:
        """Grows as long as devices get on."""
        return sum(world.progress for world in self._worlds.values())

    def abort(self) -> None:
        """Let nobody wait any more."""
        for world in self._worlds.values():
            world.abort()

    def reset(self) -> None:
        """As new; all devices must be at rest."""
        for world in self._worlds.values():
            world.reset()

    def close(self) -> None:
        """Give everything back; may be called twice."""
        for world in self._worlds.values():
            world.close()
