"""Requests that are being answered. Each stops when its client goes, when its time is over, or with the service."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from numflow.server.http.errors import ApiError, shutting_down, too_slow

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class _Job:
    def __init__(self, task: asyncio.Task):
        self.task = task
        self.reason: Exception | None = None

    def stop(self, reason: Exception) -> None:
        if self.reason is None and not self.task.done():
            self.reason = reason
            self.task.cancel()


class Jobs:
    """The running requests. limit: seconds that one request may take, waiting included."""

    def __init__(self, limit: float):
        self._limit = limit
        self._running: set[_Job] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled as soon as its result is not wanted any more.

        receive: of the request, whose body has been read.

        Raises:
            ClientGone, ApiError: why it was cancelled.
        """
        job = _Job(asyncio.ensure_future(work))
        watcher = asyncio.ensure_future(_watch(receive, job))
        timer = asyncio.get_running_loop().call_later(self._limit, job.stop, too_slow(self._limit))
        self._running.add(job)
        try:
            return await job.task
        except asyncio.CancelledError:
            job.task.cancel()
            raise job.reason or shutting_down() from None  # without a reason: the web server's patience is over
        finally:
            self._running.discard(job)
            timer.cancel()
            watcher.cancel()

    def stop_all(self, reason: ApiError) -> None:
        """End everything that runs."""
        for job in list(self._running):
            job.stop(reason)


async def _watch(receive, job: _Job) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
    job.stop(ClientGone())
