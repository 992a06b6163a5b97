"""Further routes: embeddings, tokenizer, chat template, translation, masked tokens."""

import base64
from typing import Any

import numpy as np
from starlette.requests import Request

from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.custom_tools import as_functions
from numflow.server.messages.text_schemas import (
    DetokenizeRequest,
    EmbeddingRequest,
    FillMaskRequest,
    TemplateRequest,
    TokenizeRequest,
    TranslateRequest,
)
from numflow.server.messages.wire import Json, dump_long
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import messages_of, template_variables
from numflow.server.protocols.openai_chat import finish_reason
from numflow.server.protocols.tools import render
from numflow.server.service.service import Generating, Service


async def embeddings(service: Service, request: Request) -> Json:
    """POST /v1/embeddings."""
    body = await service.read(request, EmbeddingRequest)
    texts = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else body.input
    if not all(texts):
        raise bad_request("input has an empty text", "input")

    def work(served: Served):
        vectors = served.model.embed(texts, normalize=True if body.normalize is None else body.normalize,
                                     pooling=body.pooling, truncate=bool(body.truncate), prompt=body.prompt,
                                     dimensions=body.dimensions, instruction=body.instruction)
        shown = _base64 if body.encoding_format == "base64" else _plain
        tokens = sum(len(served.tokenizer.encode(text) if isinstance(text, str) else text) for text in texts)
        return dump_long({"object": "list", "model": served.name,
                          "data": [{"object": "embedding", "index": index, "embedding": shown(vector)}
                                   for index, vector in enumerate(vectors)],
                          "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    return Json(await service.in_thread(request, body.model, work, computes=True))


def _plain(vector: np.ndarray) -> Any:
    return vector.tolist()


def _base64(vector: np.ndarray) -> Any:
    """A vector as base64 of little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def tokenize(service: Service, request: Request) -> Json:
    """POST /tokenize."""
    body = await service.read(request, TokenizeRequest)
    if sum(given is not None for given in (body.text, body.prompt, body.content, body.messages)) != 1:
        raise bad_request("give text or messages", "text")
    if body.add_special is not None and body.add_special_tokens is not None:
        raise bad_request("add_special and add_special_tokens are the same field: give one", "add_special")
    special = body.add_special_tokens if body.add_special is None else body.add_special
    if body.messages is not None and (special is not None or body.parse_special is not None):
        raise bad_request("add_special and parse_special are for text; for messages the template decides", "messages")
    if body.tools and body.messages is None:
        raise bad_request("tools need messages", "tools")

    def work(served: Served):
        if body.messages is not None:
            ids = list(render(served, messages_of(body.messages), as_functions(body.tools), {}))
        else:
            text = next(given for given in (body.text, body.prompt, body.content) if given is not None)
            add = body.content is None if special is None else special
            ids = served.tokenizer.encode(text, add, body.parse_special is not False)
        found: dict[str, Any] = {"model": served.name, "tokens": ids, "count": len(ids),
                                 "max_model_len": served.model.context}
        if body.with_pieces:
            found["pieces"] = [served.tokenizer.token_text(id) for id in ids]
        return dump_long(found)

    return Json(await service.in_thread(request, body.model, work))


async def detokenize(service: Service, request: Request) -> Json:
    """POST /detokenize."""
    body = await service.read(request, DetokenizeRequest)

    def work(served: Served):
        for id in body.tokens:
            served.tokenizer.token_text(id)  # raises for an unknown id
        text = served.tokenizer.decode(body.tokens, bool(body.skip_special))
        return {"model": served.name, "text": text, "content": text, "prompt": text}

    return Json(await service.in_thread(request, body.model, work))


async def apply_template(service: Service, request: Request) -> Json:
    """POST /apply-template: the prompt of a conversation as text."""
    body = await service.read(request, TemplateRequest)
    ignored: Ignored = request.state.ignored

    def work(served: Served):
        variables = template_variables(served, body.chat_template_kwargs, ignored)
        ids = render(served, messages_of(body.messages), as_functions(body.tools), variables)
        return {"model": served.name, "prompt": served.tokenizer.decode(ids, skip_special=False)}

    return Json(await service.in_thread(request, body.model, work))


async def translate(service: Service, request: Request) -> Json:
    """POST /translate."""
    body = await service.read(request, TranslateRequest)
    texts = [body.text] if isinstance(body.text, str) else body.text
    given = {"max_tokens": body.max_tokens, "num_beams": body.num_beams}
    settings = {name: value for name, value in given.items() if value is not None}
    running = Generating(service, request, await service.leased(request, body.model))
    try:
        running.check_count(len(texts))
        await running.start(lambda engine: engine.translation_requests(texts, body.source, body.target, **settings))
        await running.finish()
    finally:
        running.close()
    return Json({"model": running.served.name, "usage": running.usage(), "translations": [
        {"text": run.results[0].text, "finish_reason": finish_reason(run.results[0])} for run in running.runs]})


async def fill_mask(service: Service, request: Request) -> Json:
    """POST /fill-mask."""
    body = await service.read(request, FillMaskRequest)

    def work(served: Served):
        gaps = served.model.fill_mask(body.text, body.top_k or 5)
        return {"model": served.name, "gaps": [[filling._asdict() for filling in gap] for gap in gaps]}

    return Json(await service.in_thread(request, body.model, work, computes=True))
