"""Bodies of the routes that judge texts: relevance, scores, labels."""

from typing import Annotated

from pydantic import Field

from numflow.server.messages.schemas import Open, Strict, Whole

Texts = str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2048)]


class RankedText(Open):
    """A document with further fields, which are not looked at."""

    text: Annotated[str, Field(min_length=1)]


Documents = Annotated[list[Annotated[str, Field(min_length=1)] | RankedText], Field(max_length=2048)]


class RerankRequest(Strict):
    """POST /v1/rerank. texts, return_text: as text-embeddings-inference calls documents and return_documents; the
    answer is a plain list then."""

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
    """POST /v1/score: pairs of texts; one text_1 goes with every text_2."""

    model: str | None = None
    text_1: Texts
    text_2: Texts
    truncate: bool | None = None


class ClassifyRequest(Strict):
    """POST /v1/classify."""

    model: str | None = None
    input: Texts
    truncate: bool | None = None
