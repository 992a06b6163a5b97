"""Generation for callers that wait: one request as a stream of its pieces, or several side by side."""

from collections import deque
from collections.abc import Generator, Sequence

from numflow.engine.request.request import Request
from numflow.engine.run.core import Core
from numflow.engine.run.generation import Generation, Piece
from numflow.engine.run.job import Decoder, Job
from numflow.engine.run.results import choices


def stream(core: Core, request: Request, result: Generation, decoder: Decoder) -> Generator[Piece, None, None]:
    """Fill `result` token by token; yields the text that became certain with each."""
    pieces: deque[Piece | None] = deque()
    job = Job(request, decoder, request.samples, sink=pieces.append, drafters=core.drafters)
    job.samples[0].generation = result
    try:
        yield from core.pieces(core.submit(job), pieces)
        result.choices = choices(job)
    finally:
        core.leave([job])


def together(core: Core, requests: Sequence[Request], decoder: Decoder) -> list[Generation]:
    """What each request generates, all of them in the same batches. A request does not notice the others."""
    jobs: list[Job] = []
    try:
        for request in requests:
            jobs.append(core.submit(Job(request, decoder, request.samples, drafters=core.drafters)))
        for job in jobs:
            core.drive(job)
    finally:
        core.leave(jobs)
    return [_result(job) for job in jobs]


def _result(job: Job) -> Generation:
    found = choices(job)
    found[0].choices = found
    return found[0]
