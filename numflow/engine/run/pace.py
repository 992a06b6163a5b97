"""Multi-step decoding: several steps in one run of the program, if tokens depend only on logits and random numbers."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from numflow.decoding.choice import MOST_TOKENS
from numflow.engine.run.forward_job import ForwardJob
from numflow.engine.run.job import Job
from numflow.engine.runner.batches import BatchPart
from numflow.engine.runner.runner import Runner
from numflow.engine.schedule.sequence import SequenceGroup, StepPlan
from numflow.executor.contract import DECODE, MOST_STEPS

FRAME_S = 0.025  # maximum duration of one run; too short for a reader to notice
FIRST = range(1)


class Pace:
    """Choice of the number of steps of a runner that take less than FRAME_S together."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._can = DECODE in runner.program.can and not runner.has_encoder and runner.vocabulary <= MOST_TOKENS
        self._step_s = FRAME_S  # measured seconds per step in the last run

    def steps(self, plan: StepPlan, jobs: Mapping[SequenceGroup, Job | ForwardJob], alone: bool) -> int:
        """Number of steps of a plan to run at once; 0: the plan is a single step. alone: no request waits for the next
        plan."""
        if not self._can or plan.output != "logits" or plan.encodes:
            return 0
        most = min(MOST_STEPS, max(1, int(FRAME_S / self._step_s))) if alone else 1
        size = self._runner.program.block_size
        for chunk in plan.chunks:
            if chunk.count > 1 or chunk.rows != FIRST:
                return 0
            most = min(most, size - chunk.start % size,
                       jobs[chunk.sequence.group].steps_ahead(chunk.sequence, most))
        return most

    def decode(self, parts: Sequence[BatchPart], steps: int, plan: StepPlan,
               jobs: Mapping[SequenceGroup, Job | ForwardJob]) -> np.ndarray:
        """Run `steps` steps of a plan with these parts; returns the tokens int32 [steps, parts]."""
        begin = time.perf_counter()
        choices = [jobs[chunk.sequence.group].choice(chunk.sequence, steps) for chunk in plan.chunks]
        drawn = any(choice.temperature for choice in choices)
        tokens = self._runner.decode(parts, steps, choices if drawn else None)
        self._step_s = (time.perf_counter() - begin) / steps
        return tokens


def next_plan(plan: StepPlan, tokens: np.ndarray, jobs: Mapping[SequenceGroup, Job | ForwardJob]) -> np.ndarray:
    """Turn a plan into the plan of the next step. Returns the tokens [steps, n] of the sequences that are still
    running."""
    running = [i for i, chunk in enumerate(plan.chunks)
            if chunk.sequence.group in jobs and chunk.sequence in chunk.sequence.group.sequences]
    plan.chunks = [plan.chunks[i] for i in running]
    for chunk in plan.chunks:
        chunk.start += 1
    return tokens[:, running]
