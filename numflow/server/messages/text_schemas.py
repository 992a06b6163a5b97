"""Request bodies of further routes: infill, embeddings, ranking, tokenizer, templates, translation, slots, adapters."""

from typing import Annotated, Any, Literal

from pydantic import Field

from numflow.server.messages.schemas import (
    AnyTool,
    Count,
    Ids,
    Limit,
    Message,
    Open,
    Settled,
    Stop,
    Strict,
    Whole,
    Without,
)

Texts = str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
AdapterName = Annotated[str, Field(min_length=1, max_length=200)]


class InfillFile(Open):
    """Another file of the project, put in front of the prompt."""

    filename: str | None = None
    text: str


class InfillRequest(Settled):
    """POST /infill, with the field names of the server that introduced this route."""

    model: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None
    n_predict: Limit | None = None
    repeat_penalty: float | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    stop: Stop | None = None
    stream: bool | None = None


class EmbeddingRequest(Without):
    """POST /v1/embeddings."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)] | Ids | Annotated[
        list[Ids], Field(min_length=1, max_length=2048)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt: str | None = None
    instruction: str | None = None


class SlotRequest(Strict):
    """POST /slots/{id}."""

    model: str | None = None
    filename: str | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation.

    prompt: another name of text. content: like text, but without the model's special tokens unless add_special is true.
    add_special_tokens: another name of add_special.
    """

    model: str | None = None
    text: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    tools: list[AnyTool] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Count]
    skip_special: bool | None = None


class TemplateRequest(Strict):
    """POST /apply-template."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[AnyTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TranslateRequest(Strict):
    """POST /translate."""

    model: str | None = None
    text: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    source: str | None = None
    target: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    num_beams: Annotated[int, Field(ge=1)] | None = None


class FillMaskRequest(Strict):
    """POST /fill-mask."""

    model: str | None = None
    text: str
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None


class RankedText(Open):
    """A document with further fields, which are ignored."""

    text: Annotated[str, Field(min_length=1)]


Documents = Annotated[list[Annotated[str, Field(min_length=1)] | RankedText], Field(max_length=2048)]


class RerankRequest(Strict):
    """POST /v1/rerank. texts, return_text: names of documents and return_documents in text-embeddings-inference; with
    texts the answer is a plain list."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    top_k: Annotated[Whole, Field(ge=1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None


class ScoreRequest(Strict):
    """POST /v1/score: pairs of texts. A single text_1 is paired with every text_2."""

    model: str | None = None
    text_1: Texts
    text_2: Texts
    truncate: bool | None = None


class ClassifyRequest(Strict):
    """POST /v1/classify."""

    model: str | None = None
    input: Texts
    truncate: bool | None = None


class LoadAdapterRequest(Strict):
    """lora_path: a folder or file where the service runs, or ORG/NAME that it has fetched.

    scale: of the adapter's own factor. model: the base.

    load_inplace: in place of an adapter of that name."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1)]
    scale: float = 1.0
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(Strict):
    """model: the base."""

    lora_name: AdapterName
    model: str | None = None
