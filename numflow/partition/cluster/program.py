"""A plan on a Ray cluster: one actor per group of devices, placed by a placement group.

RayProgram follows the contract of an executor's Program. When an actor or its machine dies, the other actors abort
their run, a new actor replaces the dead one, and the run raises DeviceLostError. The engine then prefills its sequences
again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from numflow.errors import DeviceError, DeviceLostError
from numflow.executor.contract import Program, TraceRow
from numflow.network.windows import kinds
from numflow.ops import Batch, Network
from numflow.partition.cluster.connect import connected, environment, room
from numflow.partition.cluster.resources import bundles, listed, needs_of, nodes_of
from numflow.partition.cluster.stage import IO, GroupActor, Place
from numflow.partition.cut.plan import Plan
from numflow.partition.run.program import PROGRESS_S, START_S

GRACE_S = 15.0    # for the other actors to stop after one has failed; actors that do not stop are replaced
PLACE_S = 120.0   # for the placement group


class RayProgram(Program):
    """Runs a plan on a Ray cluster: the one at RAY_ADDRESS, or a local one.

    executors: executor name -> module with its Program and World.
    source:   returns a device's weights. It is sent to the other machines, which need the model's files at the same
    path.
    timeout:  seconds without progress of an actor after which a run fails.
    threads:  threads of each CPU device, 1 if None. resources.py computes the resource requests of actors.
    strategy: of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".

    Raises:
        DeviceError: ray is not installed, the cluster has no room, or a device cannot be started.
    """

    def __init__(self, plan: Plan, executors: Mapping[str, str], source: Callable[[Network], Any],
                 timeout: float = PROGRESS_S, threads: int | None = None, strategy: str = "PACK", **options: Any):
        self._ray = connected()
        self.plan, self.network, self.timeout = plan, plan.network, timeout
        self._make = (plan, executors, source, timeout, {**options, "threads": threads or 1})
        self._asked = bundles(needs_of(plan, threads), nodes_of(self._ray),
                              f"the {len(plan.groups)} groups of devices {plan.placement}")
        self._blocks: tuple = (0, 0)
        self._run, self.restarts = 0, 0
        self._lost: DeviceLostError | None = None  # raised by the next run
        self._actors: list[Any] = []
        self._placed: Any = None
        self._place(strategy)
        try:
            self._actors = [self._actor(group) for group in range(len(plan.groups))]
            self._connect()
            self.block_size, self.activations = (self._all(name)[0] for name in ("block_size", "activations"))
            self._weights_bytes = sum(self._all("weights_bytes"))
            self.threads = sum(filter(None, self._all("threads"))) or None
        except BaseException:
            self.close()
            raise

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights on all devices."""
        return self._weights_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of reserved KV memory, on all devices."""
        return sum(self._ask("kv_bytes"))

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers and devices."""
        return sum(self._ask("block_bytes"))

    @property
    def window_bytes(self) -> dict[int, int]:
        """Bytes of one KV block of the layers with each window, and of a slot of STATE, on all devices."""
        found: dict[int, int] = {}
        for own in self._ask("window_bytes"):
            found |= {window: size + found.get(window, 0) for window, size in own.items()}
        return {window: found.get(window, 0) for window in kinds(self.network)}

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers and devices."""
        return sum(self._ask("cross_block_bytes"))

    def places(self) -> list[Place]:
        """Machine and GPUs of the actor of each group."""
        return self._get([actor.place.remote() for actor in self._actors], self.timeout)

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Reserve KV blocks on every device; `windows` has other numbers for layers with these windows."""
        self._ask("reserve", blocks, cross_blocks, windows)
        self._blocks = (blocks, cross_blocks, windows)

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits",
            wanted: bool = True) -> np.ndarray | None:
        """Run `entry` on the batch, as an executor's Program does.

        Raises:
            DeviceLostError: an actor died and was replaced.
        """
        result = self.run_many([batch], entry, output)[0]
        return result if wanted else None

    def run_many(self, batches: Sequence[Batch], entry: str = "main",
                 output: str | None = "logits") -> list[np.ndarray | None]:
        """Run several batches, pipelined (see PlanProgram.run_many)."""
        self._run += 1
        if self._lost is not None:
            error, self._lost = self._lost, None
            raise error
        results = self._gather([actor.run_many.remote(self._run, batches, entry, output) for actor in self._actors])
        return next((result for result in results if result[0] is not None), results[0])

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """Not supported: machines have no common clock.

        Raises:
            DeviceError: always.
        """
        raise DeviceError("a trace shows the devices of one machine: load the model with transport 'threads'")

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy KV blocks, on every device."""
        self._all("copy_blocks", sources, targets, window)

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """uint8 [n, block_bytes]: the blocks' content."""
        return np.concatenate(self._all("save_blocks", blocks, window), axis=1)

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Fill KV blocks with the result of `save_blocks`."""
        sizes = self._ask("block_bytes")
        if window is not None:
            sizes = [own.get(window, 0) for own in self._ask("window_bytes")]
        shares = np.split(data, np.cumsum(sizes)[:-1], axis=1)
        self._gather([actor.call.remote("load_blocks", (blocks, np.ascontiguousarray(share), window))
                      for actor, share in zip(self._actors, shares, strict=True)])

    def close(self) -> None:
        """End the actors and release the placement group; may be called twice."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._placed is not None:
            self._ray.util.remove_placement_group(self._placed)
            self._placed = None

    # Actors

    def _place(self, strategy: str) -> None:
        ray = self._ray
        self._placed = ray.util.placement_group(self._asked, strategy=strategy)
        if not self._placed.wait(PLACE_S):
            ray.util.remove_placement_group(self._placed)
            raise DeviceError(f"the Ray cluster has no room for groups of {listed(self._asked)} (strategy {strategy}) "
                              f"within {PLACE_S:g} s: {room(ray)}; use fewer devices or threads")

    def _actor(self, group: int) -> Any:
        ray, asked, (plan, *rest) = self._ray, self._asked[group], self._make
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placed, placement_group_bundle_index=group)
        return ray.remote(concurrency_groups={IO: 1})(GroupActor).options(
            num_cpus=asked["CPU"], num_gpus=asked.get("GPU"), scheduling_strategy=where, max_restarts=0,
            runtime_env=environment()).remote(plan, group, *rest)

    def _connect(self) -> None:
        """Give every actor the handles of all actors.

        Raises:
            DeviceError: an actor could not be started.
        """
        peers = dict(enumerate(self._actors))
        try:
            self._get([actor.connect.remote(peers, self._blocks) for actor in self._actors], START_S)
        except self._ray.exceptions.RayError as error:
            words = str(error).split()
            raise DeviceError(f"the actors of devices {self.plan.placement} cannot be started: "
                              f"{' '.join(words[-40:])}") from error

    def _ask(self, name: str, *args: Any) -> list[Any]:
        """As `_all`, for calls that do not need the KV memory's content: DeviceLostError is deferred to the next
        run."""
        try:
            return self._all(name, *args)
        except DeviceLostError as error:
            self._lost = error
            return self._all(name, *args)

    def _all(self, name: str, *args: Any) -> list[Any]:
        """Call a method, or read an attribute, of every group's program."""
        return self._gather([actor.call.remote(name, args) for actor in self._actors])

    def _gather(self, answers: list[Any]) -> list[Any]:
        """Results of remote calls. On an error, all actors are stopped and dead ones replaced.

        Raises:
            DeviceLostError: an actor was replaced. Otherwise the first error of an actor.
        """
        if not self._actors:
            raise DeviceError("this program was closed")
        try:
            return self._get(answers, 2 * self.timeout + GRACE_S)
        except BaseException as error:
            lost = self._bring_to_rest(answers)
            if not lost:
                raise
            names = ", ".join(part.name for part in self.plan.devices if part.group in lost)
            raise DeviceLostError(f"device {names} was lost ({type(error).__name__}) and has been replaced; the keys "
                                  "and values that it held are gone") from error

    def _get(self, answers: list[Any], timeout: float) -> list[Any]:
        """Results of remote calls; raises the first error."""
        ray, left = self._ray, list(answers)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=timeout)
            if not done:
                raise DeviceError(f"no answer from the Ray cluster within {timeout:g} s")
            try:
                ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
        return ray.get(answers)

    def _bring_to_rest(self, answers: list[Any]) -> list[int]:
        """After a failed run, stop all actors. Returns the groups whose actors were replaced."""
        ray = self._ray
        self._run += 1
        # Wait for aborts before rests: an abort that arrives after a rest would abort the next run.
        aborts = [actor.abort.options(concurrency_group=IO).remote() for actor in self._actors]
        ray.wait([*answers, *aborts], num_returns=len(answers) + len(aborts), timeout=GRACE_S)
        rests = [actor.rest.remote(self._run) for actor in self._actors]
        ray.wait(rests, num_returns=len(rests), timeout=GRACE_S)
        lost = [group for group, pair in enumerate(zip(aborts, rests, strict=True)) if not all(map(self._done, pair))]
        if lost:
            self._replace(lost)
        return lost

    def _done(self, answer: Any) -> bool:
        try:
            self._ray.get(answer, timeout=0)
        except (self._ray.exceptions.RayError, DeviceError):
            return False
        return True

    def _replace(self, groups: list[int]) -> None:
        """Replace actors that died or hang, and reserve the same memory."""
        for group in groups:
            self._ray.kill(self._actors[group])
            self._actors[group] = self._actor(group)
            self.restarts += 1
        self._connect()
