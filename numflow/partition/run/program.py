"""A plan as one program: the contract of an executor's Program, with a worker per device."""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numflow.decoding.choice import Choice
from numflow.errors import DeviceError, DeviceFaultError, DeviceMemoryError, did_you_mean, no_memory
from numflow.executor.base import steps_to
from numflow.executor.contract import ADAPT, SAMPLE, TRACE, Program, TraceRow
from numflow.network.adapters.parts import AdaptedParts
from numflow.network.windows import STATE, kinds
from numflow.ops import ADAPTING, Batch, Network, param
from numflow.partition.cut.plan import Plan
from numflow.partition.run.micro import cut_batch, pieces_of
from numflow.partition.run.workers import Answers, ProcessWorker, Resident, ThreadWorker
from numflow.partition.run.worlds import Worlds

TRANSPORTS = {"threads": ThreadWorker, "processes": ProcessWorker}
PROGRESS_S = 120.0  # a run fails after so long without progress of any device
START_S = 900.0     # limit for reading weights and compiling kernels
_LOOK_S = 0.5       # interval of progress checks
_GRACE_S = 10.0     # limit for other devices to stop after a failure


@dataclass
class _Make:
    """Factory of a device's program, called in the device's thread or process. Picklable if its fields are."""

    program: Callable[..., Any]
    world: Any
    network: Network
    source: Callable[[Network], Any]
    index: int
    options: dict

    def __call__(self) -> Any:
        return Resident(self.program(self.network, self.source(self.network), world=self.world, device=self.index,
                                     **self.options))


class PlanProgram(Program):
    """Runs a plan, all devices concurrently.

    executor:  an object with `Program` and `World` (numflow.cpu.program, numflow.reference.program), or one per
    executor
               name in the plan.
    source:    returns the weights of a device's network, as a WeightSource. Called by each device; picklable for
               "processes".
    transport: "threads": devices are threads of this process; "processes": a process each, with shared memory.
    timeout:   seconds without progress after which a run fails.
    threads:   threads of each device; None: available cores, divided among devices.
    group:     run only the devices of this group; `remote` (Mailboxes) exchanges values with other groups.
    options:   options of the executor's Program; with several executors, each gets the options that it has.

    Raises:
        DeviceError: no such transport, or a device cannot be started.
        Errors of the executor's Program.
    """

    def __init__(self, plan: Plan, executor: Any, source: Callable[[Network], Any], transport: str = "threads",
                 timeout: float = PROGRESS_S, threads: int | None = None, group: int | None = None,
                 remote: Any = None, **options: Any):
        if transport not in TRANSPORTS:
            raise DeviceError(f"no transport {transport!r}{did_you_mean(transport, (*TRANSPORTS, 'ray'))}")
        self.plan, self.network, self.transport, self.timeout = plan, plan.network, transport, timeout
        self._answers: Answers = queue.SimpleQueue()
        self._known: dict[tuple[str, str | None], tuple[tuple[int, ...], bool]] = {}  # cache of `_facts`
        self._lock, self._broken = threading.Lock(), ""
        self.parts = [part for part in plan.devices if group is None or part.group == group]
        self._here = {part.index for part in self.parts}
        executors = executor if isinstance(executor, Mapping) else {part.executor: executor for part in self.parts}
        self._world = Worlds(self.parts, executors, threads, transport == "processes", remote)
        self._workers: list[Any] = []
        try:
            for part in self.parts:
                own = self._world.options(part.index, options)
                make = _Make(self._world.program(part.index), self._world.of(part.index), part.network, source,
                             part.index, {**own, "threads": self._world.threads[part.index]})
                self._workers.append(TRANSPORTS[transport](part.index, make, self._answers))
            self._gather(START_S)
            self._together: Any = None  # runs all devices by one call, if the executor supports it
            if transport == "threads":
                self._together = self._world.together(plan.network, [worker.program for worker in self._workers])
            self.block_size, self.activations = (self._all(name)[0] for name in ("block_size", "activations"))
            self._sizes = {name: self._all(name) for name in ("weights_bytes", "window_bytes", "cross_block_bytes")}
            owner = min((index for index in plan.owners("logits") if index in self._here), default=None)
            picks = owner is not None and SAMPLE in self._world.program(owner).can
            adapts = all(ADAPT in self._world.program(part.index).can for part in self.parts)
            self.can = frozenset({TRACE, *([SAMPLE] if picks else []), *([ADAPT] if adapts else [])})
        except BaseException:
            self.close()
            raise
        self.threads = sum(filter(None, self._world.threads.values())) or None

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights on all devices."""
        return sum(self._sizes["weights_bytes"])

    @property
    def block_bytes(self) -> int:
        """Bytes of one self-attention KV block, all layers and devices."""
        return _of_blocks(self.window_bytes)

    @property
    def window_bytes(self) -> dict[int, int]:
        """Bytes of one KV block of the layers with each window, and of a slot of STATE, on all devices."""
        return {window: sum(own.get(window, 0) for own in self._sizes["window_bytes"])
                for window in kinds(self.network)}

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers and devices."""
        return sum(self._sizes["cross_block_bytes"])

    @property
    def device_weights_bytes(self) -> list[int]:
        """Bytes of weights on each device."""
        return self._all("weights_bytes")

    @property
    def device_kv_bytes(self) -> list[int]:
        """Bytes of reserved KV memory on each device."""
        return self._all("kv_bytes")

    @property
    def kv_bytes(self) -> int:
        """Bytes of reserved KV memory, on all devices."""
        return sum(self.device_kv_bytes)

    @property
    def failure(self) -> str:
        """Reason why the program cannot run any more, such as a dead device process; "" if it can.

        Thread-safe, also during a run.
        """
        return self._broken or next((self._of_device(worker.index, worker.lost) for worker in list(self._workers)
                                     if worker.lost), "")

    @property
    def shares(self) -> tuple[Network, ...]:
        """Networks of the devices, in device order."""
        return tuple(part.network for part in self.parts)

    def set_adapter(self, number: int, parts: AdaptedParts | None) -> None:
        """See executor.contract.Program; each device gets the matrices of its own steps."""
        wanted = [{step.params["part"] for steps in share.entries.values() for step in steps if step.op in ADAPTING}
                  for share in self.shares]
        self._each("set_adapter", [(number, parts and {name: parts[name] for name in own & parts.keys()})
                                   for own in wanted])
        self._sizes["weights_bytes"] = self._all("weights_bytes")

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Reserve KV blocks (and blocks of encoder memory) on every device, keeping their content. windows: numbers of
        blocks for layers with these windows."""
        self._all("reserve", blocks, cross_blocks, windows)

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits",
            wanted: bool = True) -> np.ndarray | None:
        """Run `entry` on the batch, like an executor's Program.run. With several groups, a long batch is split into
        micro-batches (micro.py) that are pipelined through the groups.

        Raises:
            RequestError: no such entry or output, or a wrong batch.
            DeviceError: a device failed, or there was no progress.
        """
        result = self._run(batch, entry, output, None)
        return result if wanted else None

    def sample(self, batch: Batch, choices: Sequence[Choice], entry: str = "main") -> np.ndarray:
        """Sample tokens on the device that has the logits."""
        return self._run(batch, entry, "logits", choices)

    def _run(self, batch: Batch, entry: str, output: str | None, choices: Sequence[Any] | None) -> Any:
        """Run one batch, whole or in micro-batches. choices: sampling settings of each wanted row, to sample tokens."""
        pieces = pieces_of(len(batch.tokens), len(self.plan.groups)) if self._facts(entry, output)[1] else 1
        cut = [(batch, np.arange(len(batch.logit_rows)))] if pieces == 1 else cut_batch(batch, pieces)
        own = None if choices is None else [[choices[int(i)] for i in wanted] for _, wanted in cut]
        results = self.run_many([piece for piece, _ in cut], entry, output, own)
        if len(cut) == 1 or results[0] is None:
            return results[0]
        whole = np.empty((len(batch.logit_rows), *results[0].shape[1:]), results[0].dtype)
        for (_, wanted), result in zip(cut, results, strict=True):
            whole[wanted] = result
        return whole

    def run_many(self, batches: Sequence[Batch], entry: str = "main", output: str | None = "logits",
                 choices: Sequence[Sequence[Any]] | None = None) -> list[np.ndarray | None]:
        """Run batches in order, pipelined if the plan has several groups: a group starts the next batch as soon as
        it has sent its values of the last one. A sequence is in one batch only.

        choices: sampling settings of the wanted rows of each batch, if the program can sample.
        """
        owners, _ = self._facts(entry, output)
        if self._together is not None and len(batches) == 1 and choices is None:
            return [self._at_once(batches[0], entry, output, owners)]
        results = self._each("run_all", [
            (batches, entry, output if part.index in owners else None, part.index == min(owners, default=-1), choices)
            for part in self.parts])
        return next((result for result in results if result is not None), [None] * len(batches))

    def _at_once(self, batch: Batch, entry: str, output: str | None, owners: tuple[int, ...]) -> np.ndarray | None:
        """Run one batch by a single call for all devices, so that no device waits for Python code of another."""
        with self._lock:
            if self._broken:
                raise DeviceFaultError(self._broken)
            outputs = [output if part.index in owners else None for part in self.parts]
            try:
                return self._together.run(batch, entry, outputs)
            except DeviceError:
                self._world.reset()
                raise

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """Run with a trace: a row per step, device after device; labels begin with the device."""
        steps_to(self.network, entry, None)
        traces = self._all("trace", batch, entry)
        rows: list[TraceRow] = []
        for part, trace in zip(self.parts, traces, strict=True):
            first = len(rows)
            rows += [replace(row, index=first + row.index, label=f"{part.name}: {row.label}",
                             within=None if row.within is None else first + row.within) for row in trace]
        return rows

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy KV blocks, on every device."""
        self._all("copy_blocks", sources, targets, window)

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """uint8 [n, block_bytes]: the blocks' content, the devices' shares side by side."""
        return np.concatenate(self._all("save_blocks", blocks, window), axis=1)

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Fill KV blocks with what `save_blocks` returned."""
        sizes = [_of_blocks(own) if window is None else own.get(window, 0) for own in self._sizes["window_bytes"]]
        shares = np.split(data, np.cumsum(sizes)[:-1], axis=1)
        self._each("load_blocks", [(blocks, np.ascontiguousarray(share), window) for share in shares])

    def abort(self) -> None:
        """Break off what runs now: it ends with a DeviceError. Another thread may call this."""
        self._world.abort()

    @property
    def pid(self) -> int:
        """The process that this program lives in."""
        return os.getpid()

    def rest(self) -> None:
        """After an `abort` that found nothing to break off: ready to run again."""
        with self._lock:
            if not self._broken:
                self._world.reset()

    @property
    def progress(self) -> int:
        """Grows as long as the devices get on with a run."""
        return self._world.progress

    def close(self) -> None:
        """Close every device; may be called twice."""
        self._world.abort()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._broken = self._broken or "this program was closed"
        self._world.close()

    def _facts(self, entry: str, output: str | None) -> tuple[tuple[int, ...], bool]:
        """Devices that have the output, and whether batches may be cut; found once: every token asks for it."""
        if (entry, output) not in self._known:
            self._known[entry, output] = self._owners(entry, output), self._cuts_batches(entry)
        return self._known[entry, output]

    def _cuts_batches(self, entry: str) -> bool:
        """Whether rows of a sequence may run in pieces: they see earlier tokens only."""
        return self._world.in_pieces and all(
            param(step, "causal") or self.network.caches[param(step, "cache")].kind == "cross"
            for step in self.network.entries.get(entry, ()) if step.op == "attention")

    def _owners(self, entry: str, output: str | None) -> tuple[int, ...]:
        """Devices that have the output."""
        steps_to(self.network, entry, output)
        if output is None:
            return ()
        return tuple(index for index in self.plan.owners(output) if index in self._here)

    def _all(self, name: str, *args: Any) -> list[Any]:
        """The same command for every device: a method, or an attribute to read. Their answers."""
        return self._each(name, [args] * len(self.parts))

    def _each(self, name: str, args: Sequence[tuple]) -> list[Any]:
        """A command with its own arguments for each device; their answers."""
        with self._lock:
            if self._broken:
                raise DeviceFaultError(self._broken)
            for worker, own in zip(self._workers, args, strict=True):
                worker.command(name, own)
            return self._gather(self.timeout)

    def _gather(self, timeout: float) -> list[Any]:
        """An answer of each device, in order.

        Raises:
            The first error that a device answers, after all others have stopped. DeviceError: a device died, or nothing
            moved for `timeout` seconds; the program cannot be used any more.
        """
        answers: dict[int, Any] = {}
        indices = {part.index for part in self.parts}
        try:
            error = self._collect(set(indices), answers, timeout)
        except BaseException:  # Ctrl-C: leave no device behind in the middle of a run
            self._stop(indices - set(answers))
            raise
        if error is not None:
            self._stop(indices - set(answers))
            raise error
        return [answers[index] for index in sorted(answers)]

    def _collect(self, missing: set[int], answers: dict[int, Any], timeout: float) -> Exception | None:
        """Wait for answers until all are there, or one is an error, which is returned."""
        moved, progress = time.monotonic(), -1
        while missing:
            try:
                index, how, value = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                if self._world.progress != progress:
                    moved, progress = time.monotonic(), self._world.progress
                lost = next((worker for worker in self._workers if worker.index in missing and worker.lost), None)
                if lost is not None:
                    self._gone(lost.index, lost.lost)
                    return DeviceFaultError(self._broken)
                if time.monotonic() - moved <= timeout:
                    continue
                late = ", ".join(self.plan.devices[i].name for i in sorted(missing))
                return DeviceError(f"no answer from device {late} within {timeout:g} s")
            missing.discard(index)
            answers[index], moved = value, time.monotonic()
            if how == "gone":
                self._gone(index, value)
                return DeviceFaultError(self._broken)
            if how == "error":
                return self._with_device(index, value)
        return None

    def _gone(self, index: int, how: str) -> None:
        """Record that a device's process has ended: no run is possible any more."""
        self._broken = self._broken or self._of_device(index, how)

    def _of_device(self, index: int, how: str) -> str:
        return f"the process of device {self.plan.devices[index].name} {how}; load the model again"

    def _with_device(self, index: int, error: Exception) -> Exception:
        """A device's error; a memory error names the device and advises."""
        if not no_memory(error):
            return error
        part = self.plan.devices[index]
        return DeviceMemoryError(f"device {part.name}: no memory for its part of {self.network.name} ({error}); give "
                                 f"it a smaller share ({part.name}*0.5) or more devices")

    def _stop(self, missing: set[int]) -> None:
        """Abort a run: waiting devices stop. Afterwards the state is as before the run, except the cache."""
        self._world.abort()
        deadline = time.monotonic() + _GRACE_S
        while missing and (left := deadline - time.monotonic()) > 0:
            try:
                index, how, value = self._answers.get(timeout=left)
            except queue.Empty:
                break
            missing.discard(index)
            if how == "gone":
                self._gone(index, value)
        if missing:
            late = ", ".join(self.plan.devices[i].name for i in sorted(missing))
            self._broken = self._broken or f"device {late} does not answer any more; load the model again"
        elif not self._broken:
            self._world.reset()


def _of_blocks(sizes: Mapping[int, int]) -> int:
    """Bytes of a KV block in all layers, over all windows."""
    return sum(size for window, size in sizes.items() if window != STATE)
