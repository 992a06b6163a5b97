"""Request bodies of Ollama's routes."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from numflow.server.messages.schemas import Count, Open, Settled, Strict, Tool, Whole

Streams = Annotated[bool, BeforeValidator(lambda value: True if value is None else value)]  # default: true


class OllamaFunction(Open):
    """A function call of the model; arguments are an object."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(Open):
    """A call in a message."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Open):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaSettled(Settled):
    """Fields of chat and generate requests."""

    model: str | None = None
    stream: Streams = True
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None


class OllamaChat(OllamaSettled):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerate(OllamaSettled):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    system: str | None = None
    template: str | None = None
    context: list[Count] | None = None
    raw: bool | None = None


class OllamaEmbed(Strict):
    """POST /api/embed."""

    model: str | None = None
    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(Strict):
    """POST /api/embeddings, the older route for a single text."""

    model: str | None = None
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaModel(Open):
    """POST /api/show, POST /api/pull and DELETE /api/delete."""

    model: str | None = None
    name: str | None = None
    stream: Streams = True
