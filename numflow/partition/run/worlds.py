"""Exchange context of all devices of a plan: the World of each executor, and host mailboxes between executors."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from numflow.errors import DeviceError
from numflow.mailboxes import Mailboxes
from numflow.ops import Network
from numflow.partition.cut.plan import DevicePart


class Worlds:
    """The Worlds of a plan's executors as one.

    parts:     local devices. executors: executor name (DevicePart.executor) -> module with `Program` and `World`.
    threads:   threads of each device, for executors with this setting.
    shared:    devices are processes.
    remote:    mailboxes to remote devices. Several executors exchange values through mailboxes of this process.

    Raises:
        DeviceError: several executors, but devices are not threads of one process.
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
        """Options for a device: all options if there is one executor, else the options that its Program has."""
        if len(self._worlds) == 1:
            return options
        known = inspect.signature(self.program(index)).parameters
        return {name: value for name, value in options.items() if name in known}

    def together(self, network: Network, programs: Sequence[Any]) -> Any | None:
        """An object that runs the programs of all devices, parts of `network`, by one call.

        None if there are several executors, the executor cannot do so (World.together), or devices are remote.
        """
        return None if len(self._worlds) > 1 else next(iter(self._worlds.values())).together(network, programs)

    @property
    def in_pieces(self) -> bool:
        """Whether long batches may be split into micro-batches."""
        return all(world.in_pieces for world in self._worlds.values())

    @property
    def progress(self) -> int:
        """A counter that grows while devices make progress."""
        return sum(world.progress for world in self._worlds.values())

    def abort(self) -> None:
        """Abort: waiting devices stop."""
        for world in self._worlds.values():
            world.abort()

    def reset(self) -> None:
        """Reset after an abort; all devices must be idle."""
        for world in self._worlds.values():
            world.reset()

    def close(self) -> None:
        """Release all resources; may be called twice."""
        for world in self._worlds.values():
            world.close()
