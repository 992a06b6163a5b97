"""The engine: accepts requests from any thread and runs them on one thread with continuous batching."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from numflow.engine.handle import Handle
from numflow.engine.model import Model
from numflow.engine.options import EngineOptions, check, described, rows
from numflow.engine.request.budget import Budget
from numflow.engine.request.request import Request
from numflow.engine.run.core import IDLE_S
from numflow.engine.run.job import Job, Sink
from numflow.engine.runner.kv_memory import CACHE_BYTES, block_bytes, blocks_within
from numflow.engine.schedule.scheduler import StepLimits
from numflow.engine.schedule.snapshot import snapshot
from numflow.engine.sessions.disk import DiskCache
from numflow.engine.sessions.identity import identity
from numflow.engine.sessions.sessions import Session, Sessions
from numflow.errors import OutOfMemoryError, QueueFullError, RequestError, did_you_mean, option, quoted
from numflow.sizes import parse_bytes

Prompt = str | Sequence[int] | Sequence[Mapping]


@described(EngineOptions)
class Engine:
    """Continuous batching for a model.

        with numflow.Engine(model) as engine:
            handle = engine.submit("Once upon a time", max_tokens=100)
            for piece in handle:
                print(piece, end="")

    Requests join the running batch at the next step. Each request gives the same tokens as alone. While an engine is
    open, `model.generate` and similar methods run in its steps; they do not count for `max_queue`.

    {options}
    budget:          Limits on the settings of one request. Default: Budget().

    `memory`, the MemoryPlan, has the limit of the KV memory.

    Raises:
        RequestError: a value out of range, or the model has an engine or running requests already.
    """

    def __init__(self, model: Model, max_batch: int = EngineOptions.max_batch,
                 kv_memory: int | str | None = EngineOptions.kv_memory, *, budget: Budget | None = None,
                 **options: Any):
        for name in options:
            if name not in (known := [row.name for row, _ in rows(EngineOptions)]):
                raise RequestError(f"Engine has no option {name!r}{did_you_mean(name, known)}")
        how = EngineOptions(max_batch, kv_memory, **options)
        check(how)
        limits = StepLimits(max_batch, how.max_step_tokens, batching=how.batching, preemption=how.preemption)
        self.model, self.max_queue, self._core = model, how.max_queue, model.core
        self.budget = budget or Budget()
        program = model.program
        blocks, memory = None, self._core.runner.memory
        if kv_memory is not None:
            size = parse_bytes(kv_memory, option("kv_memory"))
            blocks = blocks_within(size, program, memory)
            memory = None if memory is None else replace(memory, given=size)
        cache_blocks = 0 if not how.prefix_cache else blocks or max(1, CACHE_BYTES // max(1, block_bytes(program)))
        self._core.open(limits, blocks, cache_blocks)
        self.memory = memory
        self._sessions = Sessions(self._core, partial(identity, model))
        self._disk = self._disk_cache(how)
        self._begin, self._jobs = time.perf_counter(), set[Job]()
        self._closing = self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="numflow-engine", daemon=True)
        self._thread.start()

    def _disk_cache(self, how: EngineOptions) -> DiskCache | None:
        """The prefix cache on disk, loaded."""
        if how.prefix_disk is None:
            return None
        try:
            if self._core.scheduler.prefix is None:
                raise RequestError(f"{option('prefix_disk')} has no effect without a prefix cache")
            found = DiskCache(self._sessions, parse_bytes(how.prefix_disk, option("prefix_disk")))
            found.load()
        except BaseException:
            self._core.close()
            raise
        return found

    def save_session(self, path: str | Path, slot: int = 0, note: Any = None, shared: Any = None) -> Session:
        """Save the last text of a slot to a file, atomically: its tokens, keys and values, and states.

        slot: slot of the request (id_slot); a request without one takes the slot whose text it continues, or the least
        recently used one. note: JSON value, returned by `restore_session`. shared: required owner; None: any.

        Raises:
            RequestError: no such slot, the slot has no text, or the file cannot be written.
        """
        return self._sessions.save(path, slot, note, shared)

    def restore_session(self, path: str | Path, slot: int = 0, shared: Any = None) -> Session:
        """Restore a text of `save_session`: requests that begin with it run only the tokens after it.

        Raises:
            RequestError: no session, a damaged one, or one of another model.
            OutOfMemoryError: no memory for its keys and values.
        """
        return self._sessions.restore(path, slot, shared)

    def erase_session(self, slot: int = 0, shared: Any = None) -> int:
        """Erase the last text of a slot. Returns its number of tokens.

        Raises:
            RequestError: no such slot, or the slot has no text.
        """
        return self._sessions.erase(slot, shared)

    def submit(self, prompt_or_ids: Prompt, max_tokens: int | None = 64, temperature: float | None = None,
               seed: int | None = None, priority: int = 0, n: int = 1, **decoding: Any) -> Handle:
        """Queue a request; returns at once.

        prompt_or_ids: as in Model.generate. priority: higher priorities start first, and may preempt lower ones.
        n:        number of samples; each has its own random numbers; sample 0 is the same as with n=1.
        decoding: further settings of Model.generate.

        Raises:
            QueueFullError: max_queue requests wait already.
            RequestError, TokenizerError: as Model.generate does, or the engine is closed.
        """
        handle = Handle(self._core)
        request = self.request(prompt_or_ids, max_tokens, temperature, seed, n=n, **decoding)
        handle._job = self.start(request, request.samples, priority, handle._pieces.put)
        return handle

    def request(self, prompt: Prompt, max_tokens: int | None = 64, temperature: float | None = None,
                seed: int | None = None, **decoding: Any) -> Request:
        """A checked request, ready for `start`. max_tokens None: as many as context and KV memory hold."""
        settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed} | decoding
        return self._checked(self.model.request(prompt, settings, self.budget))

    def translation_requests(self, texts: str | Sequence[str], source: str | None = None, target: str | None = None,
                             **settings: Any) -> list[Request]:
        """Checked requests, ready for `start`: a translation of each text; see Model.translate."""
        made = self.model.translation_requests(texts, source, target, self.budget, **settings)
        return [self._checked(request) for request in made]

    def _checked(self, request: Request) -> Request:
        """Check that the beams of a request fit into one step; returns the request."""
        most = self._core.scheduler.limits.sequences
        if request.beams is not None and request.beams.num_beams > most:
            raise RequestError(f"num_beams={request.beams.num_beams} is more than the {most} sequences that may run "
                               "side by side (max_batch)")
        return request

    def start(self, request: Request, n: int, priority: int, sink: Sink) -> Job:
        """Queue a checked request whose pieces go to `sink`."""
        for name, value, least in (("n", n, 1), ("priority", priority, None)):
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                raise RequestError(f"{name} should be a whole number{'' if least is None else f' from {least}'}, "
                                   f"is {quoted(value)}")
        if n > 1 and request.beams is not None:
            raise RequestError(f"a beam search has one result: leave out n={n} or num_beams")
        job = Job(request, self.model.text_decoder, n, priority, sink, self._core.drafters)
        with self._lock:
            if self._closing:
                raise RequestError("the engine is closed")
            if self._core.waiting >= self.max_queue + self._free_sequences:
                raise QueueFullError(f"{self._core.waiting} requests wait already, max_queue={self.max_queue}")
            self._core.submit(job)
            self._jobs = {other for other in self._jobs if not other.done.is_set()} | {job}
        return job

    @property
    def failure(self) -> str:
        """Reason why no request can succeed until the model is loaded again, such as a dead process of a device.

        "" if all is well.
        """
        ended = not (self._thread.is_alive() or self._closing)
        return self._core.failure or ("the engine's thread has ended" if ended else "")

    @property
    def _free_sequences(self) -> int:
        """Number of requests that can leave the queue at once."""
        return max(0, self._core.scheduler.limits.sequences - self._core.scheduler.sequences)

    @property
    def stats(self) -> dict[str, Any]:
        """Counters: running and waiting requests, KV blocks, totals since the engine was created."""
        core, scheduler = self._core, self._core.scheduler
        blocks, seconds = scheduler.blocks, time.perf_counter() - self._begin
        prompt, hit = scheduler.counts["prompt_tokens"], scheduler.counts["prefix_tokens"]
        drafts = core.counts["drafts"]
        return {
            "running": len(scheduler.running), "waiting": core.waiting, "sequences": scheduler.sequences,
            "kv_blocks_used": blocks.used, "kv_blocks_free": blocks.free, "kv_blocks_cached": blocks.cached,
            "kv_blocks_capacity": blocks.capacity, "kv_blocks_limit": blocks.limit,
            "kv_block_tokens": scheduler.block_size, "kv_bytes": core.runner.kv_bytes(),
            "kv_bytes_used": core.runner.kv_bytes(used=True),
            "swapped_bytes": sum(host.nbytes for host in core.hosts), **core.counts, **scheduler.counts,
            "prefix_hit_rate": hit / prompt if prompt else 0.0,
            "acceptance_rate": core.counts["accepted_drafts"] / drafts if drafts else 0.0,
            "uptime_s": seconds, "new_tok_s": core.counts["new_tokens"] / seconds,
            "busy_tok_s": core.counts["new_tokens"] / core.counts["step_s"] if core.counts["step_s"] else 0.0,
        }

    def snapshot(self, patience: float = 5.0) -> dict[str, Any]:
        """Snapshot of blocks, requests and prefix tree between two steps (schedule/snapshot.py).

        Raises:
            OutOfMemoryError: no step ended in `patience` seconds; ask again.
        """
        lock = self._core.runner.lock
        if not lock.acquire(timeout=patience):
            raise OutOfMemoryError(f"no step ended in {patience:g} s: ask again")
        try:
            return snapshot(self._core.scheduler)
        finally:
            lock.release()

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Refuse new requests and stop. The model stays open. May be called twice.

        drain: let running and waiting requests finish, for at most `timeout` seconds; else cancel them.
        """
        with self._lock:
            self._closing, jobs = True, list(self._jobs)
        deadline = None if timeout is None else time.monotonic() + timeout
        for job in jobs:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not drain or not job.done.wait(left):
                self._core.cancel(job)
        for job in jobs:
            job.done.wait()
        with self._core.signal:
            self._core.signal.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
            with self._lock:
                if not self._closed:
                    self._closed = True
                    if self._disk is not None and not self._core.failure:
                        self._disk.save()
                    self._core.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(drain=kind is None)

    def _loop(self) -> None:
        core = self._core
        while True:
            with core.signal:
                core.signal.wait_for(lambda: core.busy or (self._closing and not core.busy))
                if not core.busy:
                    return
            try:
                if not core.step():
                    time.sleep(IDLE_S)
            except Exception:  # the error was passed to every affected request
                continue
