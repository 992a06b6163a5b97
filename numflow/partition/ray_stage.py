"""One group of a plan as a Ray actor: its devices run in the actor's process, its values travel through Ray.

Inside a group, devices are threads that share memory, with the native exchanges; between groups, what a device sends
becomes a call of the receiving group's actor, whose array Ray carries (within a machine through its object store).
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from numflow.mailboxes import Mailboxes
from numflow.ops import Batch, Network
from numflow.partition.plan import Plan
from numflow.partition.program import PlanProgram

IO = "io"  # the concurrency group of methods that run beside a run of the devices


class ActorMailboxes(Mailboxes):
    """Mailboxes that reach the devices of other actors.

    groups: number of the group of each device. peers: actor of each group; set once all actors are there.
    run: number of the run, which goes with every value: what is left of a run that was broken off is dropped.
    """

    def __init__(self, groups: Mapping[int, int]):
        super().__init__()
        self.groups, self.run = groups, 0
        self.peers: Mapping[int, Any] = {}

    def put(self, sender: int, receiver: int, x: np.ndarray) -> None:
        self.progress += 1
        actor = self.peers[self.groups[receiver]]
        actor.deliver.options(concurrency_group=IO).remote(self.run, sender, receiver, x)

    def arrived(self, run: int, sender: int, receiver: int, x: np.ndarray) -> None:
        """A value from another actor."""
        if run >= self.run:
            super().put(sender, receiver, x)


class Stage:
    """What the actor is made of. `deliver` and `abort` are called in the concurrency group IO.

    executor: module with the Program and World of its devices. source: gives weights, from files.
    """

    def __init__(self, plan: Plan, group: int, executor: str, source: Callable[[Network], Any], timeout: float,
                 options: Mapping[str, Any]):
        self.group = group
        self.mailboxes = ActorMailboxes({part.index: part.group for part in plan.devices})
        self.program = PlanProgram(plan, import_module(executor), source, "threads", timeout, group=group,
                                   remote=self.mailboxes, **options)

    def connect(self, peers: Mapping[int, Any], blocks: tuple[int, int]) -> None:
        """Get to know the other actors; memory as it was reserved before, where this one is new."""
        self.mailboxes.peers = peers
        if any(blocks):
            self.program.reserve(*blocks)

    def run_many(self, run: int, batches: Sequence[Batch], entry: str,
                 output: str | None) -> list[np.ndarray | None]:
        """As PlanProgram.run_many; None for each batch where another group has the output. run: its number."""
        self.mailboxes.run = run
        return self.program.run_many(batches, entry, output)

    def rest(self, run: int) -> None:
        """Runs before this one are over, whatever became of them."""
        self.mailboxes.run = run
        self.program.rest()

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """A method of the program, or an attribute to read."""
        found = getattr(self.program, name)
        return found(*args) if callable(found) else found

    def deliver(self, run: int, sender: int, receiver: int, x: np.ndarray) -> None:
        """A value for one of this group's devices."""
        self.mailboxes.arrived(run, sender, receiver, x)

    def abort(self) -> None:
        """Let the devices wait no longer."""
        self.program.abort()
