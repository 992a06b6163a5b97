"""Runs what the scheduler plans: the steps of all requests of a model."""

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
from numflow.engine.run.pace import FIRST, Pace, went_on
from numflow.engine.run.places import KeptText, Places
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

MODEL_SEQUENCES, MODEL_TOKENS = 64, 512  # of a step, where no engine has set them
MOST_LOSSES = 3  # devices that are lost one after the other, without a step between, before requests fail
Work = Job | ForwardJob
AnyWork = TypeVar("AnyWork", Job, ForwardJob)
COUNTS = {"steps": 0, "tokens": 0, "new_tokens": 0, "drafts": 0, "accepted_drafts": 0, "finished": 0, "failed": 0,
          "cancelled": 0, "step_s": 0.0}
TURN_S = 0.01  # how long who waits for one request waits for its turn to step
IDLE_S = 0.002  # how long to wait where nothing can run: another thread holds memory
NO_ROWS, FIRST_ROW = np.zeros(0, np.int32), np.zeros(1, np.int32)


class Core:
    """Steps the requests of a runner. Whoever waits for one may step; each step moves them all.

    scheduler: who runs next. counts: totals since the beginning. drafters: of the model's requests.
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
        self.scheduler, self.places = self._scheduler(self._plain(), False), Places(1)

    def open(self, limits: StepLimits, blocks: int | None = None, keep_up_to: int = 0) -> None:
        """Set what steps and memory may hold, while no request is here.

        blocks: KV blocks at most, reserved at once; None: what the machine has. keep_up_to: above 0 there is a prefix
        cache; memory grows up to so many blocks before anything of it is forgotten.

        Raises:
            RequestError: it is open already, requests are running, or the memory is not to be had.
        """
        runner = self.runner
        pools, cross = [pool.allocator for pool in runner.pools], runner.cross_blocks
        with self.runner.lock:
            self._take_in()
            if self._open or self.busy:
                raise RequestError("the model has an engine already, or requests are running")
            if blocks is not None:
                if max(runner.reserved, cross.capacity) > blocks:
                    raise RequestError(f"{runner.reserved} KV blocks are reserved already, more than the {blocks} "
                                       "that are allowed now: load the model anew")
                try:
                    counts = runner.shares(blocks, limits.sequences)
                    if all(own.capacity <= count for own, count in zip(pools, counts, strict=True)):
                        # else pools have shared them out already
                        runner.reserve(counts, blocks if runner.has_encoder else 0)
                        for allocator, count in zip((*pools, cross), (*counts, blocks * runner.has_encoder)):
                            allocator.grow(count)
                except MemoryError as error:
                    size = in_words(blocks * block_bytes(self.runner.program))
                    raise OutOfMemoryError(f"no memory for {size} of keys and values ({blocks} KV blocks), which are "
                                           f"reserved at once: give kv_memory less ({error})") from None
            self._set(limits, blocks, keep_up_to)
            self.places = Places(limits.sequences)
            self._open, self.counts = True, dict(COUNTS)

    @property
    def host(self) -> HostBlocks:
        """Blocks in the host's memory, of the first pool."""
        return self.hosts[0]

    def plan(self, memory: MemoryPlan) -> None:
        """Keep keys and values within a plan, unless `open` is told another number of blocks."""
        with self.runner.lock:
            self.runner.memory = memory
            for host in self.hosts:
                host.memory = memory
            self._set(self._plain(), None, 0)

    def close(self) -> None:
        """As it was before `open`; requests that are here go on."""
        with self.runner.lock:
            self._open = False
            if not self.busy:
                self._set(self._plain(), None, 0)

    def _plain(self) -> StepLimits:
        return StepLimits(MODEL_SEQUENCES, max(MODEL_TOKENS, self.runner.chunk))

    def _set(self, limits: StepLimits, blocks: int | None, keep_up_to: int) -> None:
        for pool in self.runner.pools:
            pool.allocator.forget_idle()
            pool.allocator.keep_up_to = keep_up_to if pool.window != STATE else \
                keep_up_to * self.runner.unit // max(1, pool.size)  # as many bytes of snapshots
        if blocks is None and self.runner.memory is not None:
            blocks = self.runner.memory.blocks
        self.runner.limit(blocks)
        self.scheduler = self._scheduler(limits, keep_up_to > 0)

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
        """Reason why no step can succeed any more; "" if all is well."""
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
        """Take a job in; from any thread.

        Raises:
            RequestError: it could not run even alone.
        """
        self.scheduler.check(job.group)
        if isinstance(job, Job) and job.request.place is not None:
            self.places.check(job.request.place)
        if found := self.runner.variant(job.group.limit):
            job.group.root = job.group.root, found  # blocks with other frequencies are never shared
        with self.signal:
            self._inbox.append(job)
            self.signal.notify_all()
        return job

    def cancel(self, job: Work) -> None:
        """End a job as soon as the step that runs is over; from any thread."""
        if job.done.is_set():
            return
        with self.signal:
            self._leaving.append(job)
            self.signal.notify_all()

    def leave(self, jobs: Iterable[Work]) -> None:
        """End jobs, and wait until they have."""
        left = [job for job in jobs if not job.done.is_set()]
        for job in left:
            self.cancel(job)
        if not left:
            return
        with self.runner.lock:
            if not self._stepping:  # else a stream was collected in the midst of a step
                self._take_in()

    def drive(self, job: Work) -> None:
        """Step until a job has ended.

        Raises:
            whatever ended it.
        """
        while not job.done.is_set():
            if not self.step(lambda: not job.done.is_set()):
                time.sleep(IDLE_S)
        if job.error is not None:
            raise job.error

    def step(self, wanted: Callable[[], bool] | None = None) -> bool:
        """One step of all requests; False if there was nothing to do.

        wanted: of who waits for one request: whether a step is needed still. Such a caller waits for its turn for a
        moment only, as others may step meanwhile.
        """
        runner, plan, steps = self.runner, None, 0
        if not runner.lock.acquire(timeout=-1 if wanted is None else TURN_S):
            return True
        try:
            if wanted is not None and not wanted():
                return True
            self._take_in()
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
                        for at in range(steps):
                            self._deliver(plan, tokens[at])
                            tokens = went_on(plan, tokens, self.jobs)
                    else:
                        choices = self._choices(plan)
                        rows = runner.sample(parts, choices) if choices else runner.execute(parts, "main", plan.wanted)
                        self._tell(plan)
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
        """End the requests that lost their work to an error of a step, and not the others.

        Raises:
            the error, if it is no affair of requests alone.
        """
        if isinstance(error, DeviceLostError):
            self._start_again(error)
            return
        if isinstance(error, DeviceFaultError):
            self._failure = str(error)
        for group in list(self.jobs) if isinstance(error, DeviceFaultError) else self._concerned(plan):
            self._end(self.jobs[group], error=error)
        if not isinstance(error, DeviceFaultError) and (plan is None or not isinstance(error, Exception)):
            raise error

    def _start_again(self, error: DeviceLostError) -> None:
        """A device lost its keys and values: requests read their texts again, but not for ever."""
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

    def _take_in(self) -> None:
        """Take in what other threads have sent."""
        while self._inbox:
            job = self._inbox.popleft()
            self.jobs[job.group] = job
            self.scheduler.add(job.group)
            if job.finished:
                self._end(job)
        while self._leaving:
            self._end(self._leaving.popleft(), "cancelled")

    def _concerned(self, plan: StepPlan | None) -> list[SequenceGroup]:
        """Groups whose work is lost with a failed step: those that took part, or all if blocks were moving."""
        if plan is None:
            return list(self.jobs)
        return [group for group in (plan.groups if plan.moved else plan.groups.union(self.scheduler.running))
                if group in self.jobs]

    def _refuse(self, plan: StepPlan) -> None:
        """End requests that cannot have the memory they need."""
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
        """Draws for all wanted rows, if the program can sample and no request needs more; else None."""
        if plan.output != "logits" or SAMPLE not in self.runner.program.can:
            return None
        found = list[Choice]()
        for chunk in plan.chunks:
            if chunk.rows:
                some = self.jobs[chunk.sequence.group].device_choices(chunk.sequence, chunk.drafts)
                if some is None:
                    return None
                found += some
        return found

    def _part(self, chunk: ScheduledChunk) -> BatchPart:
        sequence, types = chunk.sequence, self.jobs[chunk.sequence.group].run()
        ids = [*sequence.ids[chunk.start:chunk.start + chunk.count], *chunk.drafts]
        rows = FIRST_ROW if chunk.rows == FIRST else np.arange(chunk.rows.start, chunk.rows.stop, dtype=np.int32)
        return BatchPart(sequence, ids, rows, None if types is None else types[chunk.start:chunk.start + chunk.count])

    def _encode(self, plan: StepPlan) -> None:
        """Let encoders read: for decoders that follow, and where their output is what is wanted."""
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

    def _tell(self, plan: StepPlan) -> None:
        """Let drafters that listen know the streams of what has run."""
        if any(self.jobs[chunk.sequence.group].listens for chunk in plan.chunks):
            streams, at = self.runner.program.result("streams"), 0
            for chunk in plan.chunks:
                self.jobs[chunk.sequence.group].saw(chunk.sequence, chunk.start, streams[at:at + chunk.count])
                at += chunk.count

    def _deliver(self, plan: StepPlan, result: np.ndarray) -> None:
        """Hand each request its rows; one that cannot use them ends alone."""
        at, rows = 0, dict[SequenceGroup, dict[Sequence, tuple[np.ndarray, list[int]]]]()
        for chunk in plan.chunks:
            count = len(chunk.rows)
            if count:
                rows.setdefault(chunk.sequence.group, {})[chunk.sequence] = result[at:at + count], chunk.drafts
            at += count
            self.scheduler.ran(chunk)
        for group, own in rows.items():
            job = self.jobs[group]
            try:
                job.advance(own, self.scheduler)
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
            self.places.put(job.group.root, ids, job.request.place)
        self.counts["failed" if error else "cancelled" if reason else "finished"] += 1
        job.end(reason, error and self.runner.explained(error))
        self._count(job)

    def forget(self, text: KeptText) -> None:
        """Forget what only this text has in the prefix cache."""
        prefix = self.scheduler.prefix
        if prefix is not None:
            ids, node, at = text.ids.tolist(), text.root, 0
            while (found := prefix.find(node, ids, at)) is not None and (at + 1) * prefix.block_size <= len(ids):
                node, at = found[0], at + 1
            prefix.erase(node)

    def _count(self, job: Work) -> None:
        """Add what the job has done since the last time."""
        for name, count in job.tally().items():
            self.counts[name] += count
