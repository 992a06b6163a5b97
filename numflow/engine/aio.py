"""The engine for asyncio."""

import asyncio
from typing import Any

from numflow.engine.engine import Engine, Prompt
from numflow.engine.handle import AsyncHandle
from numflow.engine.model import Model


class AsyncEngine:
    """An Engine whose handles are awaited; it takes the same options.

        async with numflow.AsyncEngine(model) as engine:
            handle = await engine.submit("Once upon a time")
            async for piece in handle:
                print(piece, end="")
    """

    def __init__(self, model: Model, *args: Any, **options: Any):
        self.engine = Engine(model, *args, **options)

    @property
    def stats(self) -> dict[str, Any]:
        """As Engine.stats."""
        return self.engine.stats

    async def submit(self, prompt_or_ids: Prompt, max_tokens: int | None = 64, temperature: float | None = None,
                     seed: int | None = None, priority: int = 0, n: int = 1, **decoding: Any) -> AsyncHandle:
        """As Engine.submit; the prompt is tokenized in another thread."""
        handle = AsyncHandle(self.engine._core, asyncio.get_running_loop())
        request = await asyncio.to_thread(self.engine.request, prompt_or_ids, max_tokens, temperature, seed, n=n,
                                          **decoding)
        handle._job = self.engine.start(request, request.samples, priority, handle.tell)
        return handle

    async def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """As Engine.close."""
        await asyncio.to_thread(self.engine.close, drain, timeout)

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, *_):
        await self.close(drain=kind is None)
