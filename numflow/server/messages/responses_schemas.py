"""Request bodies of OpenAI's Responses routes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from numflow.server.messages.schemas import ContentPart, Open, Settled, Strict, Whole, Without

Content = str | list[ContentPart]


class ResponsesItem(Open):
    """An item of a conversation: a message, thinking, a call or its result; its fields depend on its type."""

    type: str | None = None
    role: str | None = None
    content: Content | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None
    summary: list[ContentPart] | None = None


class ResponsesTool(Open):
    """A function, a custom tool (text input), a namespace with several tools, or one of OpenAI's own tools."""

    type: str
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list["ResponsesTool"] | None = None


class ResponsesChoice(Open):
    """A choice of one tool, or of a subset of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list["ResponsesChoice"] | None = None


class ResponsesFormat(Strict):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponsesText(Strict):
    """Options of the answer's text."""

    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ResponsesReasoning(Strict):
    """Options of thinking before the answer."""

    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = None


class ResponsesInput(Open):
    """POST /v1/responses/input_tokens; also fields that only POST /v1/responses uses."""

    model: str | None = None
    input: str | list[ResponsesItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    text: ResponsesText | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesRequest(Without, ResponsesInput, Settled):
    """POST /v1/responses."""

    model_config = Settled.model_config

    max_output_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    max_tool_calls: Annotated[Whole, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    background: bool | None = None
    prompt: Any = None
    prompt_cache_retention: str | None = None
