"""Generation of an answer to a chat request, shared by all protocols: a chat request in, parts of the reply out."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from numflow.decoding.logprobs import TokenLogprob
from numflow.decoding.structured import KINDS
from numflow.engine.engine import Engine
from numflow.engine.request.prompt import ConversationIds
from numflow.engine.request.request import Request as Checked
from numflow.engine.run.generation import Generation, Piece
from numflow.server.http.errors import bad_request
from numflow.server.http.event_loop import Run
from numflow.server.http.ignored import Ignored
from numflow.server.messages.constraints import refuse
from numflow.server.messages.reply import ReplyPart
from numflow.server.messages.schemas import ChatRequest, Settled
from numflow.server.messages.settings import chat_settings
from numflow.server.messages.wire import explained
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import ChatPrompt, prepare
from numflow.server.service.service import Generating, Service

# Fields of a chat request that other protocols accept too, with the same meaning.
SHARED = {"temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias",
          "chat_template_kwargs", "reasoning_effort", "overflow"}


def chat_request(body: Settled, ignored: Ignored, fields: Mapping[str, Any]) -> ChatRequest:
    """Convert a request of another protocol to a chat request.

    fields: fields of the chat request, from the protocol's own fields; None: not given. Further fields of the body are
    passed on unchanged.

    Raises:
        ApiError: the result is no valid chat request, or an unknown field is a constraint.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in (body.model_extra or {}).items():
        if name in ChatRequest.model_fields and (name not in SHARED or name in given):
            refuse(name, value)
            ignored.unknown(name, type(body).model_fields)
        else:
            given[name] = value
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise explained(ChatRequest, error) from None


class ReplyChoice:
    """A choice while it is generated.

    entries: log-probabilities of its tokens, of which the first `told` were sent. thought: number of thinking tokens.
    last: the parts that only the end of the text made certain.
    """

    def __init__(self, served: Served, prompt: ChatPrompt, run: Run, index: int, pieces: bool):
        self.index, self.splitter = index, prompt.make_splitter(pieces)
        self.entries: list[TokenLogprob] = []
        self.logprobs_sent = self.thought = 0
        self.last: list[ReplyPart] = []
        self._marks, self._run = served.marks, run

    def feed(self, piece: Piece) -> list[ReplyPart]:
        """Take a piece. Marks of calls and thinking that are special tokens, which decoding leaves out, are added."""
        if piece.logprob is not None:
            self.entries.append(piece.logprob)
        thinks = self.splitter.thinks
        parts = self.splitter.feed(("" if piece.id is None else self._marks.get(piece.id, "")) + piece)
        self.thought += piece.id is not None and (thinks or self.splitter.thinks)
        return parts

    def end(self) -> "ReplyChoice":
        """End the text: no more pieces follow."""
        self.last = self.splitter.feed("", end=True)
        return self

    def new_logprobs(self) -> Sequence[TokenLogprob]:
        """Log-probabilities of the tokens since the last call."""
        begin, self.logprobs_sent = self.logprobs_sent, len(self.entries)
        return self.entries[begin:]

    @property
    def result(self) -> Generation:
        """The Generation of the choice."""
        return self._run.results[self.index]


class Talk:
    """One request for an answer to a conversation.

    body: the chat request. begun: the beginning of the answer, which the model continues. make: makes the prompt, in a
    thread, for a request without messages. pieces: stream the arguments of calls.
    """

    def __init__(self, service: Service, running: Generating, body: ChatRequest, begun: str = "",
                 make: Callable[[], ChatPrompt] | None = None, pieces: bool = False):
        self.running, self.body, self.served = running, body, running.served
        self._thinking, self._begun = service.config.reasoning == "separate", begun
        self._most = service.config.max_prompt_tokens
        self._make, self._prompt = make or self._rendered, ChatPrompt(ConversationIds(), {}, {})
        self._choices: list[ReplyChoice] = []
        self._pieces = pieces

    def _rendered(self) -> ChatPrompt:
        return prepare(self.served, self.body, self._thinking, self.running.ignored, self._begun, self._most)

    async def start(self) -> None:
        """Check the request and queue it."""
        settings = chat_settings(self.body, self.served.defaults, self.running.ignored) | {"chat": True}

        def make(engine: Engine) -> list[Checked]:
            self._prompt = self._make()
            self.running.check(self._prompt.ids, "messages")
            tool_settings, free = self._prompt.settings, not any(kind in settings for kind in KINDS)
            if not free and any(kind in tool_settings for kind in KINDS):
                constraint = next(kind for kind in KINDS if kind in settings)
                raise bad_request(f"{constraint} contradicts a forced tool call: leave out one of them",
                                  "tool_choice")
            if free and settings.get("num_beams") in (None, 1):  # beam search does not support grammars
                tool_settings = {**self._prompt.wished, **tool_settings}
            return [engine.request(self._prompt.ids, **{**settings, **tool_settings})]

        await self.running.start(make)

    @property
    def ids(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self._prompt.ids

    @property
    def choices(self) -> list[ReplyChoice]:
        """The choices, one per answer, created on first access."""
        run, = self.running.runs
        if not self._choices:
            self._choices = [ReplyChoice(self.served, self._prompt, run, index, self._pieces)
                             for index in range(len(run.results))]
        return self._choices[:len(run.results)]

    async def finish(self, take: Callable[[ReplyChoice, list[ReplyPart]], Any] = lambda choice, parts: None) -> None:
        """Wait for the end of the generation. take: called with parts of the reply when they arrive."""
        choices = self.choices

        def feed(run: Run, pieces: list[Piece]) -> None:
            for piece in pieces:
                take(choices[piece.index], choices[piece.index].feed(piece))

        await self.running.finish(feed)

    async def parts(self) -> AsyncGenerator[Iterator[tuple[ReplyChoice, list[ReplyPart]]], None]:
        """Parts of the reply when they arrive, for streams, made lazily. `ended` has the remaining parts."""
        run, = self.running.runs
        choices = self.choices
        async for pieces in run:
            self.running.came(run, pieces)
            yield ((choices[piece.index], choices[piece.index].feed(piece)) for piece in pieces)

    def ended(self) -> list[ReplyChoice]:
        """All choices after the end of the generation; `last` has their remaining parts."""
        return [choice.end() for choice in self.choices]
