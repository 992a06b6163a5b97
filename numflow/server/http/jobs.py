"""Running requests. A request is cancelled when its client disconnects, at its time limit, or at shutdown."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from numflow.server.http.errors import ApiError, shutting_down, too_slow

T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected."""


class _Job:
    def __init__(self, task: asyncio.Task):
        self.task = task
        self.reason: Exception | None = None

    def stop(self, reason: Exception) -> None:
        if self.reason is None and not self.task.done():
            self.reason = reason
            self.task.cancel()


class Jobs:
    """The running requests. limit: time limit of a request in seconds, waiting included."""

    def __init__(self, limit: float):
        self._limit = limit
        self._running: set[_Job] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; cancel it when the client disconnects or the time is over.

        receive: the ASGI receive function of the request, whose body has been read.

        Raises:
            ClientGone, ApiError: the reason for which it was cancelled.
        """
        job = _Job(asyncio.ensure_future(work))
        watcher = asyncio.ensure_future(_watch(receive, job))
        timer = asyncio.get_running_loop().call_later(self._limit, job.stop, too_slow(self._limit))
        self._running.add(job)
        try:
            return await job.task
        except asyncio.CancelledError:
            job.task.cancel()
            raise job.reason or shutting_down() from None  # without a reason, the web server has cancelled the request
        finally:
            self._running.discard(job)
            timer.cancel()
            watcher.cancel()

    def stop_all(self, reason: ApiError) -> None:
        """Cancel all running requests."""
        for job in list(self._running):
            job.stop(reason)


async def _watch(receive, job: _Job) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
    job.stop(ClientGone())
