"""Execution of the scheduler's plans: the steps of all requests of a model."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.run.forward_job import ForwardJob
from numflow.engine.run.job import Job
from numflow.engine.run.pace import FIRST, Pace, next_plan
from numflow.engine.run.text_slots import SlotText, TextSlots
from numflow.engine.runner.batches import BatchPart, EncodedText
from numflow.engine.runner.host_blocks import HostBlocks
from numflow.engine.runner.kv_memory import MemoryPlan, block_bytes
from numflow.engine.runner.runner import Runner
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.scheduler import Scheduler, StepLimits
from numflow.engine.schedule.sequence import ScheduledChunk, Sequence, SequenceGroup, StepPlan
from numflow.engine.speculate.drafters import Drafters
from numflow.errors import DeviceFaultError, DeviceLostError, OutOfMemoryError, RequestError
from numflow.executor.contract import SAMPLE
from numflow.network.windows import STATE
from numflow.sizes import in_words

MODEL_SEQUENCES, MODEL_TOKENS = 64, 512  # limits of a step without an engine
MOST_LOSSES = 3  # devices lost in a row, without a successful step between them, before requests fail
Work = Job | ForwardJob
AnyWork = TypeVar("AnyWork", Job, ForwardJob)
COUNTS = {"steps": 0, "tokens": 0, "new_tokens": 0, "drafts": 0, "accepted_drafts": 0, "finished": 0, "failed": 0,
          "cancelled": 0, "step_s": 0.0}
TURN_S = 0.01  # time-out of a caller that waits for its turn to step
IDLE_S = 0.002  # pause if nothing can run because another thread holds the memory
NO_ROWS, FIRST_ROW = np.zeros(0, np.int32), np.zeros(1, np.int32)


class Core:
    """Runs the requests of a runner step by step. Any thread that waits for a request may run the step of all requests.

    scheduler: plans the steps. counts: totals since the start. drafters: factory of drafters. slots: the last texts.
    """

    def __init__(self, runner: Runner):
        self.runner, self.drafters = runner, Drafters()
        self.jobs: dict[SequenceGroup, Work] = {}
        self.counts = dict(COUNTS)
        self.signal = threading.Condition()
        self._inbox: deque[Work] = deque()
        self._leaving: deque[Work] = deque()
        self._stepping, self._losses, self._failure = False, 0, ""
        self._pace = Pace(runner)
        several = len(runner.pools) > 1
        self.hosts = [HostBlocks(runner.program, pool.size, pool.window if several else None) for pool in runner.pools]
        self._open = False
        self.scheduler, self.slots = self._scheduler(self._default_limits(), False), TextSlots(1)

    def open(self, limits: StepLimits, blocks: int | None = None, cache_up_to: int = 0) -> None:
        """Open the core for an engine with limits of steps and memory. No request may be running.

        blocks: maximum number of KV blocks, reserved at once; None: the memory of the machine. cache_up_to: above 0
        there is a prefix cache; memory grows up to this number of blocks before cached blocks are evicted.

        Raises:
            RequestError: the core is open already, requests are running, or the memory cannot be reserved.
        """
        runner = self.runner
        pools, cross = [pool.allocator for pool in runner.pools], runner.cross_blocks
        with self.runner.lock:
            self._drain_inbox()
            if self._open or self.busy:
                raise RequestError("the model has an engine already, or requests are running")
            if blocks is not None:
                if max(runner.reserved, cross.capacity) > blocks:
                    raise RequestError(f"{runner.reserved} KV blocks are reserved already, more than the {blocks} "
                                       "that are allowed now: load the model anew")
                try:
                    counts = runner.shares(blocks, limits.sequences)
                    if all(pool.capacity <= count for pool, count in zip(pools, counts, strict=True)):
                        # else the pools have divided the memory already
                        runner.reserve(counts, blocks if runner.has_encoder else 0)
                        for allocator, count in zip((*pools, cross), (*counts, blocks * runner.has_encoder)):
                            allocator.grow(count)
                except MemoryError as error:
                    size = in_words(blocks * block_bytes(self.runner.program))
                    raise OutOfMemoryError(f"no memory for {size} of keys and values ({blocks} KV blocks), which are "
                                           f"reserved at once: give kv_memory less ({error})") from None
            self._configure(limits, blocks, cache_up_to)
            self.slots = TextSlots(limits.sequences)
            self._open, self.counts = True, dict(COUNTS)

    @property
    def host(self) -> HostBlocks:
        """Host blocks of the first pool."""
        return self.hosts[0]

    def plan(self, memory: MemoryPlan) -> None:
        """Limit the KV memory by a plan, unless `open` gets a number of blocks."""
        with self.runner.lock:
            self.runner.memory = memory
            for host in self.hosts:
                host.memory = memory
            self._configure(self._default_limits(), None, 0)

    def close(self) -> None:
        """Restore the limits from before `open`; running requests continue."""
        with self.runner.lock:
            self._open = False
            if not self.busy:
                self._configure(self._default_limits(), None, 0)

    def _default_limits(self) -> StepLimits:
        return StepLimits(MODEL_SEQUENCES, max(MODEL_TOKENS, self.runner.chunk))

    def _configure(self, limits: StepLimits, blocks: int | None, cache_up_to: int) -> None:
        for pool in self.runner.pools:
            pool.allocator.evict_all()
            pool.allocator.cache_up_to = cache_up_to if pool.window != STATE else \
                cache_up_to * self.runner.unit // max(1, pool.size)  # the same number of bytes for snapshots
        if blocks is None and self.runner.memory is not None:
            blocks = self.runner.memory.blocks
        self.runner.limit(blocks)
        self.scheduler = self._scheduler(limits, cache_up_to > 0)

    def _scheduler(self, limits: StepLimits, prefix: bool) -> Scheduler:
        runner = self.runner
        size = runner.program.block_size
        limits = replace(limits, chunk=runner.chunk)
        allocators = [pool.allocator for pool in runner.pools]
        return Scheduler(runner.pools, runner.cross_blocks, size, limits,
                         PrefixCache(allocators[0], size, *allocators[1:]) if prefix and runner.causal else None,
                         [host.allocator for host in self.hosts])

    @property
    def failure(self) -> str:
        """Reason why no step can succeed any more; "" if there is none."""
        return self._failure or self.runner.program.failure

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._inbox or self._leaving or self.scheduler.busy)

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._inbox) + len(self.scheduler.waiting)

    def submit(self, job: AnyWork) -> AnyWork:
        """Queue a job; may be called from any thread.

        Raises:
            RequestError: the job could not run even alone.
        """
        self.scheduler.check(job.group)
        if isinstance(job, Job) and job.request.slot is not None:
            self.slots.check(job.request.slot)
        if found := self.runner.variant(job.group.limit):
            job.group.root = job.group.root, found  # blocks with other rotary frequencies are never shared
        with self.signal:
            self._inbox.append(job)
            self.signal.notify_all()
        return job

    def cancel(self, job: Work) -> None:
        """Cancel a job after the current step; may be called from any thread."""
        if job.done.is_set():
            return
        with self.signal:
            self._leaving.append(job)
            self.signal.notify_all()

    def leave(self, jobs: Iterable[Work]) -> None:
        """Cancel jobs and wait until they have ended."""
        left = [job for job in jobs if not job.done.is_set()]
        for job in left:
            self.cancel(job)
        if not left:
            return
        with self.runner.lock:
            if not self._stepping:  # else a stream was garbage-collected during a step
                self._drain_inbox()

    def drive(self, job: Work) -> None:
        """Run steps until a job has ended.

        Raises:
            the error of the job.
        """
        while not job.done.is_set():
            if not self.step(lambda: not job.done.is_set()):
                time.sleep(IDLE_S)
        if job.error is not None:
            raise job.error

    def step(self, wanted: Callable[[], bool] | None = None) -> bool:
        """Run one step of all requests; False if there was nothing to do.

        wanted: function of a caller that waits for one request: whether a step is still needed. Such a caller waits for
        its turn at most TURN_S, since other threads may run the steps.
        """
        runner, plan, steps = self.runner, None, 0
        if not runner.lock.acquire(timeout=-1 if wanted is None else TURN_S):
            return True
        try:
            if wanted is not None and not wanted():
                return True
            self._drain_inbox()
            begin, self._stepping = time.perf_counter(), True
            try:
                self._draft()
                plan = self.scheduler.plan()
                self._refuse(plan)
                if not plan:
                    return False
                self._move(plan)
                self._encode(plan)
                if parts := [self._part(chunk) for chunk in plan.chunks]:
                    if steps := self._pace.steps(plan, self.jobs, not (self.waiting or self._leaving)):
                        tokens = self._pace.decode(parts, steps, plan, self.jobs)
                        for step in range(steps):
                            self._deliver(plan, tokens[step])
                            tokens = next_plan(plan, tokens, self.jobs)
                    else:
                        choices = self._choices(plan)
                        rows = runner.sample(parts, choices) if choices else runner.execute(parts, "main", plan.wanted)
                        self._pass_streams(plan)
                        self._deliver(plan, rows)
                self._losses = 0
            except BaseException as error:
                self._fail(plan, error)
            finally:
                self._stepping = False
                if plan is not None:
                    plan.release()
            self.counts["steps"] += steps or 1
            self.counts["tokens"] += plan.tokens * (steps or 1) if plan else 0
            self.counts["step_s"] += time.perf_counter() - begin
            return True
        finally:
            runner.lock.release()

    def _fail(self, plan: StepPlan | None, error: BaseException) -> None:
        """End the requests that a failed step affected, and no others.

        Raises:
            the error, if it is not limited to requests.
        """
        if isinstance(error, DeviceLostError):
            self._recover(error)
            return
        if isinstance(error, DeviceFaultError):
            self._failure = str(error)
        for group in list(self.jobs) if isinstance(error, DeviceFaultError) else self._affected(plan):
            self._end(self.jobs[group], error=error)
        if not isinstance(error, DeviceFaultError) and (plan is None or not isinstance(error, Exception)):
            raise error

    def _recover(self, error: DeviceLostError) -> None:
        """Recover from a lost device: requests recompute their tokens, at most MOST_LOSSES times in a row."""
        self._losses += 1
        if self._losses > MOST_LOSSES:
            for job in list(self.jobs.values()):
                self._end(job, error=error)
        self.scheduler.lost()

    def _draft(self) -> None:
        """Let the running requests draft tokens."""
        for group in list(self.scheduler.running):
            try:
                self.jobs[group].propose()
            except Exception as error:
                self._end(self.jobs[group], error=error)

    def _drain_inbox(self) -> None:
        """Move submitted and cancelled jobs of other threads from the inbox to the scheduler."""
        while self._inbox:
            job = self._inbox.popleft()
            self.jobs[job.group] = job
            self.scheduler.add(job.group)
            if job.finished:
                self._end(job)
        while self._leaving:
            self._end(self._leaving.popleft(), "cancelled")

    def _affected(self, plan: StepPlan | None) -> list[SequenceGroup]:
        """Groups whose work is lost with a failed step: the step's, or all running if moving blocks failed."""
        if plan is None:
            return list(self.jobs)
        return [group for group in (plan.groups if plan.moved else plan.groups.union(self.scheduler.running))
                if group in self.jobs]

    def _refuse(self, plan: StepPlan) -> None:
        """End requests that do not fit into the memory."""
        for group, tokens in plan.refused:
            self._end(self.jobs[group],
                      error=OutOfMemoryError(f"no memory for the keys and values of {tokens} tokens"))

    def _move(self, plan: StepPlan) -> None:
        """Save, load and copy blocks."""
        for pool, moves in plan.moving.items():
            host = self.hosts[pool]
            if moves.saves:
                host.save(moves.saves)
            if moves.loads:
                host.load(moves.loads)
            if moves.copies:
                self.runner.program.copy_blocks(*map(list, zip(*moves.copies)), *host.only)
        plan.moved = True
        self.runner.trim()

    def _choices(self, plan: StepPlan) -> list[Choice] | None:
        """Sampling parameters of all rows, if the program can sample and no request needs the logits; else None."""
        if plan.output != "logits" or SAMPLE not in self.runner.program.can:
            return None
        found = list[Choice]()
        for chunk in plan.chunks:
            if chunk.rows:
                draws = self.jobs[chunk.sequence.group].device_choices(chunk.sequence, chunk.drafts)
                if draws is None:
                    return None
                found += draws
        return found

    def _part(self, chunk: ScheduledChunk) -> BatchPart:
        sequence, types = chunk.sequence, self.jobs[chunk.sequence.group].run()
        ids = [*sequence.ids[chunk.start:chunk.start + chunk.count], *chunk.drafts]
        rows = FIRST_ROW if chunk.rows == FIRST else np.arange(chunk.rows.start, chunk.rows.stop, dtype=np.int32)
        return BatchPart(sequence, ids, rows, None if types is None else types[chunk.start:chunk.start + chunk.count])

    def _encode(self, plan: StepPlan) -> None:
        """Run encoders: for the decoders of their requests, and for requests that read the encoder's output."""
        for output in (None, "encoder_hidden"):
            reads = [(group, scratch) for group, scratch in plan.encodes
                     if (group.output == "encoder_hidden") == (output is not None)]
            if not reads:
                continue
            parts = [BatchPart(EncodedText(group), np.asarray(self.jobs[group].encoder_ids),
                               np.arange(group.encoder, dtype=np.int32) if output else NO_ROWS) for group, _ in reads]
            result = self.runner.execute(parts, "encode", output, [scratch for _, scratch in reads])
            if output:
                ends = np.cumsum([group.encoder for group, _ in reads])
                for (group, _), rows in zip(reads, np.split(result, ends[:-1])):
                    self.jobs[group].take(rows)
                    self._end(self.jobs[group])

    def _pass_streams(self, plan: StepPlan) -> None:
        """Pass the residual streams of the step to drafters that need them."""
        if any(self.jobs[chunk.sequence.group].needs_streams for chunk in plan.chunks):
            streams, offset = self.runner.program.result("streams"), 0
            for chunk in plan.chunks:
                end = offset + chunk.count
                self.jobs[chunk.sequence.group].observe(chunk.sequence, chunk.start, streams[offset:end])
                offset = end

    def _deliver(self, plan: StepPlan, result: np.ndarray) -> None:
        """Pass each request its rows; a request that fails on them ends alone."""
        offset, rows = 0, dict[SequenceGroup, dict[Sequence, tuple[np.ndarray, list[int]]]]()
        for chunk in plan.chunks:
            count = len(chunk.rows)
            if count:
                rows.setdefault(chunk.sequence.group, {})[chunk.sequence] = result[offset:offset + count], chunk.drafts
            offset += count
            self.scheduler.ran(chunk)
        for group, group_rows in rows.items():
            job = self.jobs[group]
            try:
                job.advance(group_rows, self.scheduler)
            except Exception as error:
                self._end(job, error=error)
                continue
            self._count(job)
            if job.finished:
                self._end(job)

    def _end(self, job: Work, reason: str | None = None, error: BaseException | None = None) -> None:
        if self.jobs.pop(job.group, None) is None:
            return
        self.scheduler.remove(job.group)
        if self.scheduler.prefix is not None and error is None and isinstance(job, Job) and (ids := job.text()):
            self.slots.put(job.group.root, ids, job.request.slot, job.group.adapter_start)
        self.counts["failed" if error else "cancelled" if reason else "finished"] += 1
        job.end(reason, error and self.runner.explain(error))
        self._count(job)

    def forget(self, text: SlotText) -> None:
        """Remove the blocks of a text that no other text shares from the prefix cache."""
        if (prefix := self.scheduler.prefix) is not None:
            ids, node, index = text.ids.tolist(), text.root, 0
            while (found := prefix.find(node, ids, index)) is not None and (index + 1) * prefix.block_size <= len(ids):
                node, index = found[0], index + 1
            prefix.erase(node)

    def _count(self, job: Work) -> None:
        """Add the counts of a job since the last call to the totals."""
        for name, count in job.tally().items():
            self.counts[name] += count
