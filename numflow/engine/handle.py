"""Handles of submitted requests: streamed pieces, results, cancellation."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator

from numflow.engine.run.core import Core
from numflow.engine.run.generation import Generation, Piece
from numflow.engine.run.job import Job


class Submitted:
    """Base of both handles: a job, its state and its cancellation."""

    def __init__(self, core: Core):
        self._core = core
        self._job: Job

    @property
    def done(self) -> bool:
        """Whether the request has ended, by success, error or cancellation."""
        return self._job.done.is_set()

    def cancel(self) -> None:
        """Cancel the request after the current step; results keep the text so far, with finish_reason "cancelled"."""
        self._core.cancel(self._job)

    def _raise(self) -> None:
        if self._job.error is not None:
            raise self._job.error

    def _results(self) -> list[Generation]:
        self._raise()
        return self._job.choices


class Handle(Submitted):
    """A submitted request. Iteration yields each Piece once; `piece.index` is the index of its sample.

    Any thread may iterate; each piece goes to one thread.
    """

    def __init__(self, core: Core):
        super().__init__(core)
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Piece]:
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # further iterations find the end again
        self._raise()

    def result(self, timeout: float | None = None) -> Generation:
        """The first sample, or the best one (best_of), complete.

        Raises:
            TimeoutError: the request is not done after `timeout` seconds.
            NumflowError or any other error that ended the request.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Generation]:
        """All n samples, complete, in order; the n best ones, best first, with best_of.

        Raises:
            as `result` does.
        """
        if not self._job.done.wait(timeout):
            raise TimeoutError(f"the request is not done after {timeout} s")
        return self._results()


class AsyncHandle(Submitted):
    """A Handle for asyncio: `async for piece in handle`, `await handle.result()`."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop):
        super().__init__(core)
        self._loop = loop
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._ended = asyncio.Event()

    def tell(self, piece: Piece | None) -> None:
        """Pass a piece to the event loop; called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, piece)
        except RuntimeError:  # the event loop was closed: nobody awaits the result
            self._core.cancel(self._job)

    def _take(self, piece: Piece | None) -> None:
        self._pieces.put_nowait(piece)
        if piece is None:
            self._ended.set()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        self._pieces.put_nowait(None)
        self._raise()

    async def result(self, timeout: float | None = None) -> Generation:
        """As Handle.result."""
        return (await self.results(timeout))[0]

    async def results(self, timeout: float | None = None) -> list[Generation]:
        """As Handle.results."""
        await asyncio.wait_for(self._ended.wait(), timeout)
        return self._results()
