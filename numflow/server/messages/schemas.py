"""Request bodies of OpenAI's chat and completion routes and of Inferflow's route, with numflow's own settings."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

Count = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Count], Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]  # name of a tool
Stop = str | Annotated[list[str], Field(max_length=16)]


def whole(value: Any) -> Any:
    """Convert a float without a fraction to an integer: some clients write 16.0 for 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]  # for single numbers; too slow for the items of long lists
Limit = Annotated[Whole, Field(ge=-1, lt=2**31)]  # of new tokens; -1: as many as fit


def _fail_fast(schema: Any) -> None:
    """Make all lists of a schema stop at their first invalid item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _fail_fast(part)


class CheckedFields(BaseModel):
    """A JSON object whose validation stops at the first invalid item of a list, and at the first unknown field.

    A list of all errors of a large body would take far more time and memory than the body.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context == "open" or cls.model_config.get("extra") != "forbid" or not isinstance(data, dict):
            return data
        known_fields = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in data if name not in known_fields]
        if len(unknown) < 2:
            return data
        return {name: data[name] for name in (*(known_fields & data.keys()), unknown[0])}


def _numbers(bias: Any) -> Any:
    """Check that all values are numbers; report only the first that is not."""
    if isinstance(bias, Mapping):
        for name, value in bias.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise PydanticCustomError("float_type", "Input should be a map of token ids to numbers, {name} "
                                          "has none", {"name": repr(name[:40])})
    return bias


class Strict(CheckedFields):
    """An object with strict types and only the declared fields; others are ignored or refused (wire.parse)."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Open(CheckedFields):
    """An object that may have further fields, which its reader checks."""

    model_config = ConfigDict(extra="allow", strict=True)


class Settled(Open):
    """A body of a route that generates text. Its further fields are numflow's settings (top_k, min_p, regex, ...)."""


class Without(Strict):
    """Fields that clients send and that have no effect on an answer."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(Open):
    """A part of a message's content."""

    type: str
    text: str | None = None


class FunctionCall(Strict):
    """A function call of the model."""

    name: str
    arguments: str


class CustomInput(Strict):
    """A call of a custom tool, with its input text."""

    name: str
    input: str


class MessageCall(Strict):
    """A call of a function in a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomMessageCall(Strict):
    """A call of a custom tool in a message."""

    id: str
    type: Literal["custom"]
    custom: CustomInput


def _kind(value: Any) -> str:
    """The kind of a tool, a call or a choice, for the discriminator: errors are reported for this kind only."""
    given = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "Custom" if given == "custom" else "Function"


AnyCall = Annotated[Annotated[MessageCall, Tag("Function")] | Annotated[CustomMessageCall, Tag("Custom")],
                    Discriminator(_kind)]


class Message(Open):
    """One message of a conversation; it may have further fields for the chat template."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[AnyCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that is a function."""

    type: Literal["function"]
    function: Function


class GrammarText(Strict):
    """A grammar and its syntax."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Strict):
    """Format of a custom tool's input text."""

    type: Literal["text", "grammar"]
    grammar: GrammarText | None = None


class Custom(Strict):
    """Name, description and input format of a custom tool."""

    name: Name
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Strict):
    """A custom tool, whose input is a text."""

    type: Literal["custom"]
    custom: Custom


AnyTool = Annotated[Annotated[Tool, Tag("Function")] | Annotated[CustomTool, Tag("Custom")], Discriminator(_kind)]


class Named(Strict):
    """The name of a tool."""

    name: str


class ToolChoice(Strict):
    """The function that the model must call."""

    type: Literal["function"]
    function: Named


class CustomChoice(Strict):
    """The custom tool that the model must call."""

    type: Literal["custom"]
    custom: Named


AnyChoice = Annotated[Annotated[ToolChoice, Tag("Function")] | Annotated[CustomChoice, Tag("Custom")],
                      Discriminator(_kind)]


class AllowedTools(Strict):
    """A subset of the tools. The model may call any of them (auto), or must call one (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Field(min_length=1)]


class AllowedChoice(Strict):
    """A tool choice that allows a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(Strict):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Open):
    """Format of the answer: text, json_object, json_schema, or a type of other engines (constraints.py)."""

    type: str
    json_schema: JsonSchema | None = None


class GeneratingBody(Without, Settled):
    """Fields of chat and completion requests."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Limit | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    seed: Whole | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[Mapping[str, float] | None, BeforeValidator(_numbers)] = None
    response_format: ResponseFormat | None = None


class ChatRequest(GeneratingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | CustomChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: Literal["none", "auto"] | Named | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    overflow: Literal["refuse", "drop", "shift"] | None = None


class CompletionRequest(GeneratingBody):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0)] | None = None
    best_of: Annotated[Whole, Field(ge=1)] | None = None


class NativeHeader(Strict):
    """Header of Inferflow's request. fn: the function; "" and "generate" generate text."""

    fn: Literal["", "generate", "get_stat"] = ""
    user: str | None = None
    passcode: str | None = None


class NativeRequest(Settled):
    """POST /: a request of Inferflow's interface."""

    text: Annotated[str, Field(min_length=1)] | None = None
    system_prompt: str | None = None
    res_prefix: str | None = None
    encoder_input_template: str | None = None
    decoder_input_template: str | None = None
    decoding_alg: str | dict[str, Any] | None = None
    random_seed: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    max_output_len: Annotated[int, Field(ge=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    is_streaming_mode: bool | Literal[0, 1] = True
    header: NativeHeader | None = None
    model: str | None = None
    stop: Stop | None = None
