"""POST /v1/completions: text completion, with log-probabilities of prompt and new tokens for evaluation harnesses."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.decoding.logprobs import TokenLogprob
from numflow.engine.engine import Engine
from numflow.engine.request.request import Request as Checked
from numflow.engine.run.generation import Piece
from numflow.server.http.errors import bad_request
from numflow.server.http.event_loop import Run
from numflow.server.messages.logprobs import CompletionLogprobs
from numflow.server.messages.schemas import CompletionRequest
from numflow.server.messages.settings import completion_settings
from numflow.server.messages.wire import DONE, event
from numflow.server.models.served import Served
from numflow.server.protocols.openai_chat import finish_reason
from numflow.server.service.service import Answer, Generating, Service


async def completions(service: Service, request: Request) -> Response:
    """Continue one or several texts."""
    return await service.answer(request, CompletionRequest, _Answer)


class _Answer(Answer):
    """The reply to one request."""

    def __init__(self, service: Service, running: Generating, body: CompletionRequest):
        self._service, self._running, self._body, self._served = service, running, body, running.served
        self._prompts = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) \
            else body.prompt
        self._n = body.n or 1
        self._ids: list[Sequence[int]] = []
        self._echoes: list[_Echo] = []
        self._all: dict[int, list[_Choice]] = {}
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._envelope = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion",
                          "created": int(time.time()), "model": self._served.name,
                          "system_fingerprint": self._served.fingerprint}

    async def start(self) -> None:
        settings = completion_settings(self._body, self._served.defaults, self._running.ignored)
        model = self._served.model
        if self._body.echo and model.runner.has_encoder:
            raise bad_request("echo is not supported by encoder-decoder models: their text does not continue the "
                              "prompt", "echo", "unsupported")
        self._running.check_count(len(self._prompts) * max(self._n, self._body.best_of or 1))

        def make(engine: Engine) -> list[Checked]:
            extra = self._encoded()
            for ids in self._ids:
                self._running.check(ids, "prompt")
            requests = [engine.request(ids, **{**settings, **extra}) for ids in self._ids]
            if self._body.echo:
                self._echoes = [_Echo(self._served, prompt, checked)
                                for prompt, checked in zip(self._prompts, requests, strict=True)]
            return requests

        await self._running.start(make)

    def _encoded(self) -> dict[str, Any]:
        """Encode the prompts; return the settings that they need."""
        encode, suffix = self._served.prompts.encode, self._body.suffix
        if not suffix:
            self._ids = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in self._prompts]
            return {}
        if not all(isinstance(prompt, str) for prompt in self._prompts):
            raise bad_request("suffix needs a prompt of text, not of token ids", "prompt", "unsupported")
        found = [self._served.filled_in(prompt, suffix) for prompt in self._prompts if isinstance(prompt, str)]
        self._ids = [ids for ids, _ in found]
        return found[0][1]

    async def finish(self) -> None:
        """Wait for the end of the generation."""
        choices = self._all = {id(run): [_Choice(self, index, run, sample) for sample in range(len(run.results))]
                               for index, run in enumerate(self._running.runs)}

        def take(run: Run, pieces: list[Piece]) -> None:
            for piece in pieces:
                choices[id(run)][piece.index].take(piece)

        await self._running.finish(take)

    def whole(self) -> dict[str, Any]:
        """The reply in one piece."""
        choices: list[dict[str, Any]] = []
        for run in self._running.runs:
            for choice in best(self._all[id(run)][:len(run.results)], self._n):
                part = choice.first() + choice.new(end=True)
                choices.append({"index": len(choices), "text": part.text, "logprobs": part.logprobs,
                                "finish_reason": finish_reason(run.results[choice.sample])})
        return {**self._envelope, "choices": choices, "usage": self._running.usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in server-sent events, one prompt after the other."""
        for index, run in enumerate(self._running.runs):
            choices = [_Choice(self, index, run, sample) for sample in range(len(run.results))]
            if self._body.echo:
                yield b"".join(self._chunk(choice, choice.first()) for choice in choices)
            async for pieces in run:
                self._running.came(run, pieces)
                for piece in pieces:
                    choices[piece.index].take(piece)
                parts = [(choice, choice.new()) for choice in choices]
                if chunks := [self._chunk(choice, part) for choice, part in parts if part.text]:
                    yield b"".join(chunks)
            yield b"".join(self._chunk(choice, choice.new(end=True), finish_reason(run.results[choice.sample]))
                           for choice in choices[:len(run.results)])
        if self._usage:
            yield event({**self._envelope, "choices": [], "usage": self._running.usage()})
        yield DONE

    def _chunk(self, choice: "_Choice", part: "_Part", finish: str | None = None) -> bytes:
        return event({**self._envelope, **({"usage": None} if self._usage else {}), "choices": [
            {"index": choice.prompt * self._n + choice.sample, "text": part.text, "logprobs": part.logprobs,
             "finish_reason": finish}]})


class _Part:
    """A piece of text with the log-probabilities of its tokens."""

    def __init__(self, text: str, logprobs: dict[str, Any] | None = None):
        self.text, self.logprobs = text, logprobs

    def __add__(self, other: "_Part") -> "_Part":
        if self.logprobs is None or other.logprobs is None:
            return _Part(self.text + other.text, self.logprobs or other.logprobs)
        both = {key: None if value is None else [*value, *other.logprobs[key]] for key, value in self.logprobs.items()}
        return _Part(self.text + other.text, both)


class _Echo:
    """A prompt that is repeated in the reply. entries: log-probabilities of its tokens, if requested."""

    def __init__(self, served: Served, prompt: str | Sequence[int], checked: Checked):
        stream = served.tokenizer.stream()
        self.texts = [stream.push(id) for id in checked.prompt]
        self.texts[-1] += stream.flush()
        self.text = prompt if isinstance(prompt, str) else "".join(self.texts)
        self.entries = checked.prompt_logprobs or []


class _Choice:
    """One sample of one prompt while it is generated."""

    def __init__(self, answer: _Answer, prompt: int, run: Run, sample: int):
        self.prompt, self.run, self.sample = prompt, run, sample
        self._echo = answer._echoes[prompt] if answer._echoes else None
        self._wanted = answer._body.logprobs is not None
        self._logprobs = CompletionLogprobs(answer._served.tokenizer, answer._body.logprobs or 0)
        self.entries: list[TokenLogprob] = []
        self._texts: list[str] = []
        self._text, self._logprobs_sent = "", 0

    def take(self, piece: Piece) -> None:
        """Take a piece."""
        self._text += piece
        if piece.logprob is not None:
            self.entries.append(piece.logprob)
        if piece.id is not None:
            self._texts.append(str(piece))
        elif self._texts:
            self._texts[-1] += piece

    def first(self) -> _Part:
        """The echoed prompt."""
        if self._echo is None:
            return _Part("")
        if not self._wanted:
            return _Part(self._echo.text)
        return _Part(self._echo.text, self._logprobs.add(self._echo.entries, self._echo.texts))

    def new(self, end: bool = False) -> _Part:
        """The text since the last call. Tokens without text are held until the next token with text, or the end."""
        if not self._text and not end:
            return _Part("")
        text, self._text = self._text, ""
        if not self._wanted:
            return _Part(text)
        begin, self._logprobs_sent = self._logprobs_sent, len(self.entries)
        return _Part(text, self._logprobs.add(self.entries[begin:], self._texts[begin:]))


def best(choices: Sequence[_Choice], n: int) -> list[_Choice]:
    """The n choices with the highest mean log-probability per token; all choices in order, if there are at most n."""
    if len(choices) <= n:
        return list(choices)

    def mean(choice: _Choice) -> float:
        return sum(entry.logprob for entry in choice.entries) / max(1, len(choice.entries))

    return sorted(choices, key=mean, reverse=True)[:n]
