"""Bridge from the engine's thread to asyncio: pieces of generated text are handed to the event loop in batches."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from numflow.engine.engine import Engine
from numflow.engine.request.request import Request
from numflow.engine.run.generation import Generation, Piece
from numflow.engine.run.job import Job
from numflow.errors import QueueFullError
from numflow.server.http.errors import busy, shutting_down


class Hub:
    """Carries pieces from engines' threads to the event loop, which is woken once for all pieces that have arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._arrived: deque[tuple[Run, Piece | None]] = deque()
        self._woken = False

    def tell(self, run: "Run", piece: Piece | None) -> None:
        """Report a piece of a run, or its end (None); called from any thread."""
        self._arrived.append((run, piece))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed: the service has ended
                run.cancel()

    def _deliver(self) -> None:
        self._woken = False  # before the loop: later pieces must wake the event loop again
        while self._arrived:
            run, piece = self._arrived.popleft()
            run.take(piece)


class Run:
    """One request in the engine. Iteration yields lists of pieces; `results` is complete at the end.

    Raises:
        ApiError: the queue is full.
    """

    def __init__(self, hub: Hub, engine: Engine, request: Request, n: int = 1, priority: int = 0, retry: int = 1):
        self._engine, self._pieces, self._ended, self._news = engine, list[Piece](), False, asyncio.Event()
        self.request = request
        try:
            self._job: Job = engine.start(request, n, priority, lambda piece: hub.tell(self, piece))
        except QueueFullError:
            raise busy(engine.stats["waiting"], retry) from None

    def take(self, piece: Piece | None) -> None:
        """Take a piece, or the end (None); called by the hub."""
        if piece is None:
            self._ended = True
        else:
            self._pieces.append(piece)
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        while not self._ended or self._pieces:
            await self._news.wait()
            self._news.clear()
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield pieces
        if self._job.error is not None:
            raise self._job.error
        if any(result.finish_reason == "cancelled" for result in self._job.results):
            raise shutting_down()

    @property
    def results(self) -> list[Generation]:
        """The samples generated so far."""
        return self._job.results

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """(name, begin, end) of the phases queue, prefill and decode, as far as they have ended (time.perf_counter()).
        """
        return self._job.phases

    @property
    def reused(self) -> int:
        """Number of prompt tokens from the prefix cache."""
        return self._job.group.reused

    @property
    def new_tokens(self) -> int:
        """Number of new tokens of all samples."""
        return sum(len(result.ids) for result in self._job.results)

    def cancel(self) -> None:
        """Cancel the request after the current step; no effect if it has ended."""
        if not self._job.done.is_set():
            self._engine.model.core.cancel(self._job)
