"""Requests in the engine, seen from asyncio: its thread tells pieces, the event loop takes them in bunches."""

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
    """Carries pieces from engines' threads to the event loop, waking it once for all that have come."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._arrived: deque[tuple[Run, Piece | None]] = deque()
        self._woken = False

    def tell(self, run: "Run", piece: Piece | None) -> None:
        """From any thread: a piece of a run has come, or its end."""
        self._arrived.append((run, piece))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: the service has ended, and nobody listens
                run.cancel()

    def _deliver(self) -> None:
        self._woken = False  # first: what comes from now on wakes the loop again
        while self._arrived:
            run, piece = self._arrived.popleft()
            run.take(piece)


class Run:
    """One request in the engine. Iterating yields lists of pieces; `results` is complete at the end.

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
        """A piece has come, or the end; called by the hub."""
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
        """The samples as far as they are generated."""
        return self._job.results

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """Name, begin and end (time.perf_counter()) of what it has gone through: queue, prefill, decode."""
        return self._job.phases

    @property
    def reused(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return self._job.group.reused

    @property
    def new_tokens(self) -> int:
        """Tokens that have come, of all samples."""
        return sum(len(result.ids) for result in self._job.results)

    def cancel(self) -> None:
        """End it after the step that runs; nothing happens if it has ended."""
        if not self._job.done.is_set():
            self._engine.model.core.cancel(self._job)
