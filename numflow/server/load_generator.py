"""Load test: many clients of a service for a limited time, with their measurements. Only for services on loopback."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from numflow.errors import RequestError
from numflow.server.service.guard import LOOPBACK

TEXT = ("the river runs through old towns and quiet fields while people talk about weather music work and bread "
        "under a wide sky where birds turn slowly and lights come on one by one")
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class LoadTest:
    """Plan of a load test.

    clients: concurrent requests. seconds: time in which new requests are sent. limit: seconds for the whole run.
    requests: largest number of requests; None: no limit. prompt_words: words of each prompt; all prompts differ.
    first: number of the first request, from which its prompt is generated. fields: further fields of each request.
    """

    url: str
    clients: int = 32
    seconds: float = 20.0
    requests: int | None = None
    prompt_words: int = 32
    max_tokens: int = 64
    model: str | None = None
    key: str | None = None
    first: int = 0
    limit: float = 120.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        url = urlsplit(self.url)
        if url.scheme != "http" or url.hostname not in LOOPBACK or url.port is None:
            raise RequestError(f"the load test is for services of this machine only, such as http://127.0.0.1:8080, "
                               f"not {self.url!r}")
        for name in ("clients", "prompt_words", "max_tokens", "seconds", "limit"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} should be above 0, is {getattr(self, name)}")

    def prompt(self, number: int) -> str:
        """Prompt of request `number`."""
        words = random.Random(number).choices(TEXT.split(), k=self.prompt_words)
        return " ".join([str(number), *words])

    def body(self, number: int) -> bytes:
        """JSON body of request `number`."""
        return json.dumps({"prompt": self.prompt(number), "max_tokens": self.max_tokens, "temperature": 0,
                           "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
                           **({"model": self.model} if self.model else {}), **self.fields}).encode()


@dataclass
class Measured:
    """Measurements of the clients: seconds to the first token, between tokens and in total, tokens, errors."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """The report of the run; times in seconds."""
        return {"requests": len(self.total), "errors": self.errors, "seconds": self.seconds, "new_tokens": self.tokens,
                "prompt_tokens": self.prompt_tokens,
                "new_tok_s": self.tokens / self.seconds if self.seconds else 0.0,
                "requests_per_s": len(self.total) / self.seconds if self.seconds else 0.0,
                "time_to_first_token_s": spread(self.first), "inter_token_s": spread(self.between),
                "request_s": spread(self.total)}


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles 50, 95 and 99 (nearest rank), and the mean; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    return {**ranks, "mean": sum(ordered) / len(ordered)}


def run(load: LoadTest) -> Measured:
    """Run the load test until the time is over and every request has ended."""
    return asyncio.run(_run(load))


async def _run(load: LoadTest) -> Measured:
    measured, begin = Measured(), time.perf_counter()
    numbers = iter(range(load.first, load.first + (load.requests or 1 << 60)))

    async def client():
        for number in numbers:
            if time.perf_counter() - begin > load.seconds:
                return
            try:
                await _request(load, number, measured)
            except (OSError, EOFError, ValueError) as error:
                name = str(error)[:80] or type(error).__name__
                measured.errors[name] = measured.errors.get(name, 0) + 1
                await asyncio.sleep(0.05)  # a service that refuses is not hammered

    try:
        async with asyncio.timeout(load.limit):
            await asyncio.gather(*(client() for _ in range(load.clients)))
    except TimeoutError:
        measured.errors["unfinished when the time was over"] = load.clients
    measured.seconds = time.perf_counter() - begin
    return measured


async def _request(load: LoadTest, number: int, measured: Measured) -> None:
    begin = last = time.perf_counter()
    usage: dict[str, int] = {}
    events = 0
    async for event in _events(load, load.body(number)):
        now = time.perf_counter()
        if event == b"[DONE]":
            break
        if b'"usage":{' in event:
            usage = json.loads(event)["usage"]
        elif event.startswith(b'{"error":'):
            raise ValueError(json.loads(event)["error"]["message"])
        elif b'"text":""' not in event:
            (measured.between if events else measured.first).append(now - last)
            events, last = events + 1, now
    if not usage:
        raise ValueError("the stream ended early")
    measured.total.append(last - begin)
    measured.tokens += usage["completion_tokens"]
    measured.prompt_tokens += usage["prompt_tokens"]


async def _events(load: LoadTest, body: bytes) -> AsyncIterator[bytes]:
    """The data of a stream's events, with a minimal HTTP client: clients and service share the CPU."""
    url = urlsplit(load.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n{key}"
                     f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            raise ValueError(f"status {status}")
        held = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            held += (await reader.readexactly(size + 2))[:-2]
            *events, held = held.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:]
    finally:
        writer.close()
