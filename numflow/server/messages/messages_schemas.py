"""Request bodies of Anthropic's Messages routes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from numflow.server.messages.schemas import Open, Settled, Strict, Whole


class MessageBlock(Open):
    """A block of content; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    source: Any = None


class MessageTurn(Open):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessagesTool(Open):
    """A function with the schema of its input, or one of Anthropic's own tools, which have a type."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class MessagesChoice(Strict):
    """The tool choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(Strict):
    """Options of thinking before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Whole, Field(ge=0)] | None = None
    display: str | None = None


class MessagesFormat(Strict):
    """Format of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None


class MessagesOutput(Strict):
    """Options of the model's output."""

    effort: str | None = None
    format: MessagesFormat | None = None


class CountRequest(Open):
    """POST /v1/messages/count_tokens; also fields that only POST /v1/messages uses."""

    model: str | None = None
    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: str | list[MessageBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutput | None = None
    output_format: MessagesFormat | None = None


class MessagesRequest(CountRequest, Settled):
    """POST /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1, lt=2**31)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None
    cache_control: Any = None
