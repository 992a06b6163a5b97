"""One group of a plan as a Ray actor: its devices run in the actor's process.

Devices of a group are threads that share memory and use the executor's exchanges. Between groups, a send calls the
actor of the receiving group, and Ray transports the array (within a machine through its object store). Data from a GPU
goes through pinned host memory.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from numflow.errors import DeviceError, NumflowError
from numflow.mailboxes import Mailboxes
from numflow.ops import Batch, Network
from numflow.partition.cluster.resources import visible_gpus
from numflow.partition.cut.plan import Plan
from numflow.partition.run.program import PlanProgram
from numflow.partition.run.workers import portable

IO = "io"  # the concurrency group of methods that run beside a run of the devices


class ActorMailboxes(Mailboxes):
    """Mailboxes that also reach devices of other actors.

    groups: group index of each device. peers: actor of each group, set once all actors exist.
    run: number of the run, sent with every value, so that values of an aborted run are dropped.
    """

    def __init__(self, groups: Mapping[int, int]):
        super().__init__()
        self.groups, self.run = groups, 0
        self.peers: Mapping[int, Any] = {}
        self._later = ThreadPoolExecutor(1, "numflow-parcels")

    def put(self, sender: int, receiver: int, x: Any) -> None:
        """Send x: an array, or a pending GPU copy. A thread waits for the copy, so that the sender does not."""
        self.progress += 1
        if isinstance(x, np.ndarray):
            self._hand_over(self.run, sender, receiver, x)
        else:
            self._later.submit(self._hand_over, self.run, sender, receiver, x)

    def take(self, sender: int, receiver: int) -> np.ndarray:
        """As Mailboxes.take; raises the error of a sender whose GPU failed."""
        x = super().take(sender, receiver)
        if isinstance(x, Exception):
            raise x
        return x

    def arrived(self, run: int, sender: int, receiver: int, x: np.ndarray) -> None:
        """Deliver a value from another actor."""
        if run >= self.run:
            super().put(sender, receiver, x)

    def _hand_over(self, run: int, sender: int, receiver: int, x: Any) -> None:
        try:
            x = np.asarray(x)
        except NumflowError as error:
            x = portable(error)
        actor = self.peers[self.groups[receiver]]
        actor.deliver.options(concurrency_group=IO).remote(run, sender, receiver, x)


@dataclass(frozen=True)
class Place:
    """Location of an actor. node: Ray node id. visible: CUDA_VISIBLE_DEVICES in the actor. gpus: device name ->
    index among visible GPUs; without CPU devices."""

    node: str
    visible: str | None
    gpus: Mapping[str, int]


class GroupActor:
    """The actor of one group of devices. `deliver` and `abort` are called in the concurrency group IO.

    executors: executor name -> module with Program and World. source: returns weights from files.
    Errors of the constructor are raised by `connect`, because Ray would wrap them.
    """

    def __init__(self, plan: Plan, group: int, executors: Mapping[str, str], source: Callable[[Network], Any],
                 timeout: float, options: Mapping[str, Any]):
        self.group = group
        self.gpus: Mapping[str, int] = {}
        self.mailboxes = ActorMailboxes({part.index: part.group for part in plan.devices})
        self.program: Any = None
        self._failure: NumflowError | None = None
        try:
            self.gpus = _given_gpus(plan, group)
            self.program = self._made(plan, executors, source, timeout, options)
        except NumflowError as error:
            self._failure = error

    def _made(self, plan, executors, source, timeout, options) -> PlanProgram:
        executor: Any = import_module(executors[plan.devices[plan.groups[self.group][0]].executor])
        if len({part.executor for part in plan.devices}) > 1:  # pass only the options that this executor has
            known = {*inspect.signature(executor.Program).parameters, "threads"}
            options = {name: value for name, value in options.items() if name in known}
        executor = _on_gpus(executor, self.gpus) if self.gpus else executor
        return PlanProgram(plan, executor, source, "threads", timeout, group=self.group, remote=self.mailboxes,
                           **options)

    def place(self) -> Place:
        """Location of this actor."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES"), self.gpus)

    def connect(self, peers: Mapping[int, Any], blocks: tuple) -> None:
        """Receive the handles of all actors; reserve memory, if this actor is a replacement.

        Raises:
            DeviceError: Ray assigned no GPU to GPU devices. Errors of PlanProgram.
        """
        if self._failure is not None:
            raise portable(self._failure)
        self.mailboxes.peers = peers
        if any(blocks):
            self.program.reserve(*blocks)

    def run_many(self, run: int, batches: Sequence[Batch], entry: str,
                 output: str | None) -> list[np.ndarray | None]:
        """As PlanProgram.run_many; None for each batch if another group has the output. run: number of the run."""
        self.mailboxes.run = run
        return self.program.run_many(batches, entry, output)

    def rest(self, run: int) -> None:
        """Reset after an aborted run; `run` is the number of the next."""
        self.mailboxes.run = run
        self.program.rest()

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Call a method of the program, or read an attribute."""
        found = getattr(self.program, name)
        return found(*args) if callable(found) else found

    def deliver(self, run: int, sender: int, receiver: int, x: np.ndarray) -> None:
        """Deliver a value to one of this group's devices."""
        self.mailboxes.arrived(run, sender, receiver, x)

    def abort(self) -> None:
        """Abort the current run: waiting devices stop."""
        self.program.abort()


def _given_gpus(plan: Plan, group: int) -> dict[str, int]:
    """Index among visible GPUs for each GPU device of the group, by name."""
    wanted = [plan.devices[index].name for index in plan.groups[group] if plan.devices[index].executor == "cuda"]
    if not wanted:
        return {}
    import ray

    hidden = os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0").lower() not in ("0", "false", "")
    found = visible_gpus(wanted, ray.get_gpu_ids(), shown=not hidden)
    if not found:
        raise DeviceError(f"Ray has given no GPU to the actor of devices {', '.join(wanted)}")
    return found


def _on_gpus(executor: Any, indices: Mapping[str, int]) -> Any:
    """The executor with devices mapped to these GPU indices instead of those in their names."""
    def world(networks, threads=None, shared=False, remote=None, names=None):
        return executor.World(networks, threads, shared, remote,
                              names={index: str(indices[name]) for index, name in names.items()})

    return SimpleNamespace(Program=executor.Program, World=world)
