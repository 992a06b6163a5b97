"""Generation for synchronous callers: one request as a stream of pieces, or several requests in one batch."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from numflow.engine.request.request import Request
from numflow.engine.run.core import IDLE_S, Core
from numflow.engine.run.generation import Generation, Piece
from numflow.engine.run.job import Decoder, Job


class Stream:
    """Iterator over the pieces of a generation; `result` is complete when the iteration ends.

    The request starts at the first call of next(). close() (or the end of a `with`) cancels the request and frees its
    memory.
    """

    def __init__(self, core: Core, request: Request, decoder: Decoder):
        self.result = Generation()
        self._core, self._request, self._decoder = core, request, decoder
        self._pieces: deque[Piece | None] = deque()
        self._job: Job | None = None
        self._over = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._over:
            raise StopIteration
        try:
            job = self._job or self._start()
            while not job.done.is_set() or self._pieces:
                if not self._pieces:
                    if not self._core.step(self._waits):
                        time.sleep(IDLE_S)
                elif (piece := self._pieces.popleft()) is not None:
                    return piece
            if job.error is not None:
                raise job.error
        except BaseException:
            self.close()
            raise
        self._over, self.result.choices = True, job.choices
        raise StopIteration

    def _start(self) -> Job:
        core, request = self._core, self._request
        job = Job(request, self._decoder, request.samples, sink=self._pieces.append, drafters=core.drafters)
        job.samples[0].generation = self.result
        self._job = job
        return core.submit(job)

    def _waits(self) -> bool:
        """Whether a step is needed for the next piece."""
        assert self._job is not None
        return not self._pieces and not self._job.done.is_set()

    def close(self) -> None:
        """Stop generating."""
        self._over = True
        if self._job is not None:
            self._core.leave([self._job])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()


def together(core: Core, requests: Sequence[Request], decoder: Decoder) -> list[Generation]:
    """Generations of several requests in the same batches. A request's result does not depend on other requests."""
    jobs: list[Job] = []
    try:
        for request in requests:
            jobs.append(core.submit(Job(request, decoder, request.samples, drafters=core.drafters)))
        for job in jobs:
            core.drive(job)
    finally:
        core.leave(jobs)
    for job in jobs:
        job.choices[0].choices = job.choices
    return [job.choices[0] for job in jobs]
