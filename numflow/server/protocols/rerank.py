"""Routes for ranking and classification: documents ranked by a query, scores of pairs, labels of texts."""

import secrets
import time
from collections.abc import Sequence

import numpy as np
from starlette.requests import Request

from numflow.server.http.errors import bad_request
from numflow.server.messages.text_schemas import ClassifyRequest, RankedText, RerankRequest, ScoreRequest
from numflow.server.messages.wire import Json, dump_long
from numflow.server.models.served import Served
from numflow.server.service.service import Service

Pair = tuple[str, str]


async def rerank(service: Service, request: Request) -> Json:
    """POST /v1/rerank: documents sorted by relevance, the most relevant first."""
    body = await service.read(request, RerankRequest)
    given = body.documents if body.texts is None else body.texts
    if given is None or (body.documents is not None and body.texts is not None):
        raise bad_request("give documents, a list of texts", "documents", "missing_field")
    documents = [one.text if isinstance(one, RankedText) else one for one in given]
    most = body.top_k if body.top_n is None else body.top_n

    def work(served: Served) -> bytes:
        pairs = [(body.query, document) for document in documents]
        found = relevance(served, pairs, body.truncate is not False)
        order = np.argsort(-np.array(found), kind="stable").tolist()[:most]
        if body.texts is not None:  # a plain list, as in text-embeddings-inference
            return dump_long([{"index": index, "score": found[index],
                               **({"text": documents[index]} if body.return_text else {})} for index in order])
        shown = [{"index": index, "relevance_score": found[index],
                  **({"document": {"text": documents[index]}} if body.return_documents else {})} for index in order]
        usage = _usage(served, pairs)
        return dump_long({"id": f"rerank-{secrets.token_hex(12)}", "object": "list", "model": served.name,
                          "results": shown, "usage": usage, "meta": {"billed_units": {"search_units": 1}}})

    return Json(await service.in_thread(request, body.model, work, computes=True))


async def score(service: Service, request: Request) -> Json:
    """POST /v1/score: a score for each pair of texts."""
    body = await service.read(request, ScoreRequest)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise bad_request(f"text_1 has {len(first)} texts and text_2 {len(second)}: give as many, or one text_1",
                          "text_2", "invalid_value")
    pairs = list(zip(first, second, strict=True))

    def work(served: Served) -> bytes:
        data = [{"index": index, "object": "score", "score": found} for index, found in enumerate(
            relevance(served, pairs, body.truncate is not False))]
        return dump_long({"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()),
                          "model": served.name, "data": data, "usage": _usage(served, pairs)})

    return Json(await service.in_thread(request, body.model, work, computes=True))


async def classify(service: Service, request: Request) -> Json:
    """POST /v1/classify: labels of texts, by a classifier."""
    body = await service.read(request, ClassifyRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input

    def work(served: Served) -> bytes:
        labels = served.model.score_head.labels
        found = served.model.scores(texts, truncate=body.truncate is not False, probabilities=True)
        data = [{"index": index, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
                for index, row in enumerate(found)]
        tokens = sum(len(served.tokenizer.encode(text)) for text in texts)
        return dump_long({"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()),
                          "model": served.name, "labels": labels, "data": data,
                          "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    return Json(await service.in_thread(request, body.model, work, computes=True))


def relevance(served: Served, pairs: Sequence[Pair], truncate: bool) -> list[float]:
    """Relevance of the second text of each pair to the first: 0 .. 1 by a reranker, or else the cosine of embeddings.

    Raises:
        RequestError: the model is no reranker and makes no embeddings.
    """
    model = served.model
    if not pairs:
        return []
    if model.facts.labels:
        if len(model.score_head.labels) > 2:
            raise bad_request(f"{served.name} has {len(model.score_head.labels)} labels: it is a classifier, for "
                              "/v1/classify", "model", "unsupported")
        return model.scores(pairs, truncate=truncate, probabilities=True)[:, -1].tolist()
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    row = {text: index for index, text in enumerate(texts)}
    vectors = model.embed(texts, normalize=True, truncate=truncate).astype(np.float64)
    return [float(vectors[row[first]] @ vectors[row[second]]) for first, second in pairs]


def _usage(served: Served, pairs: Sequence[Pair]) -> dict[str, int]:
    tokens = sum(len(served.tokenizer.encode_pair(*pair)[0]) for pair in pairs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
