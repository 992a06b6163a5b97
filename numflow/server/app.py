"""The table of routes, and the ASGI application."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from numflow.server.explore import routes as explore
from numflow.server.http import pages
from numflow.server.http.ignored import HEADER
from numflow.server.messages import schemas
from numflow.server.messages import text_schemas as bodies
from numflow.server.messages.messages_schemas import CountRequest, MessagesRequest
from numflow.server.messages.ollama_schemas import OllamaChat, OllamaEmbed, OllamaEmbedding, OllamaGenerate, OllamaModel
from numflow.server.messages.responses_schemas import ResponsesInput, ResponsesRequest
from numflow.server.messages.wire import Json
from numflow.server.openapi import openapi
from numflow.server.protocols import messages, ollama, ollama_models, rerank, responses
from numflow.server.protocols import openai_texts as texts
from numflow.server.protocols.inferflow import native
from numflow.server.protocols.infill import infill
from numflow.server.protocols.openai_chat import chat
from numflow.server.protocols.openai_completions import completions
from numflow.server.service import adapters, slots, status
from numflow.server.service.guard import LOOPBACK, OWN_NAMES, Guard
from numflow.server.service.service import Service

log = logging.getLogger("numflow.server")
Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One route.

    about: a line for the documentation. body: schema of the request's body. shown: a page or a route of a page, which
    exists only with the option `page`.
    """

    method: str
    paths: tuple[str, ...]
    handler: Handler
    about: str = ""
    body: type[BaseModel] | None = None
    shown: bool = False


async def page(service: Service, request: Request) -> Response:
    """GET /: the chat page."""
    return pages.answer("index.html")


async def schema(service: Service, request: Request) -> Json:
    """GET /openapi.json."""
    return Json(openapi(ENDPOINTS))


ENDPOINTS = (
    Endpoint("POST", ("/v1/chat/completions", "/chat/completions"), chat, "OpenAI: chat; streams, tools, structured "
             "output, log-probabilities, several answers", schemas.ChatRequest),
    Endpoint("POST", ("/v1/completions", "/completions"), completions, "OpenAI: text completion; one or more prompts "
             "of text or token ids; `echo` and `logprobs` for evaluation harnesses", schemas.CompletionRequest),
    Endpoint("POST", ("/v1/responses", "/responses"), responses.responses, "OpenAI: conversations of items; streams, "
             "tools, thinking, structured output, `previous_response_id`", ResponsesRequest),
    Endpoint("POST", ("/v1/responses/input_tokens",), responses.count, "number of tokens of a response's input",
             ResponsesInput),
    Endpoint("GET", ("/v1/responses/{id}", "/responses/{id}"), responses.stored, "a stored response"),
    Endpoint("DELETE", ("/v1/responses/{id}", "/responses/{id}"), responses.forget, "delete a stored response"),
    Endpoint("GET", ("/v1/responses/{id}/input_items",), responses.input_items, "input items of a stored response"),
    Endpoint("POST", ("/v1/messages",), messages.messages, "Anthropic: conversations of blocks; streams, tools, "
             "thinking, structured output", MessagesRequest),
    Endpoint("POST", ("/v1/messages/count_tokens",), messages.count_tokens, "Anthropic: number of tokens of a "
             "conversation", CountRequest),
    Endpoint("POST", ("/v1/embeddings", "/embeddings"), texts.embeddings, "OpenAI: embeddings of texts, or of token "
             "ids, which are used unchanged; `float` and `base64`; also `pooling`, `normalize`, `truncate`, `prompt`, "
             "`instruction`",
             bodies.EmbeddingRequest),
    Endpoint("POST", ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"), rerank.rerank, "documents "
             "sorted by relevance to a query, by a reranker or by the cosine of embeddings", bodies.RerankRequest),
    Endpoint("POST", ("/v1/score", "/score"), rerank.score, "relevance scores of pairs of texts: `text_1`, `text_2`",
             bodies.ScoreRequest),
    Endpoint("POST", ("/v1/classify", "/classify"), rerank.classify, "labels of texts, by a classifier",
             bodies.ClassifyRequest),
    Endpoint("GET", ("/v1/models", "/models"), status.models, "list of the configured models"),
    Endpoint("GET", ("/v1/models/{id:path}", "/models/{id:path}"), status.model, "one configured model"),
    Endpoint("POST", ("/v1/load_lora_adapter",), adapters.load, "load a LoRA adapter that requests can then use: "
             "`lora_name`, `lora_path`, `scale`, `load_inplace`; needs `load_adapters`", bodies.LoadAdapterRequest),
    Endpoint("POST", ("/v1/unload_lora_adapter",), adapters.unload, "unload a LoRA adapter: `lora_name`",
             bodies.UnloadAdapterRequest),
    Endpoint("POST", ("/",), native, "Inferflow's interface", schemas.NativeRequest),
    Endpoint("GET", ("/",), page, "the chat page, a single file without external resources; conversations stay in the "
             "browser", shown=True),
    Endpoint("GET", ("/explore",), explore.page, "a page that shows the state of the engine, with the four routes "
             "below; their query may name a `model`", shown=True),
    Endpoint("GET", ("/explore/kv",), explore.kv, "KV blocks and their holders, requests, prefix tree; no texts",
             shown=True),
    Endpoint("GET", ("/explore/quantisation",), explore.quantisation, "a tensor quantised with a scheme: `tensor`, "
             "`scheme`, `row`; without `tensor` the lists of both", shown=True),
    Endpoint("GET", ("/explore/roofline",), explore.limits, "this machine's limits and the ops of the last request",
             shown=True),
    Endpoint("GET", ("/explore/timeline",), explore.partitions, "predicted activity of a cluster's devices: `cluster`, "
             "`devices`, `batch`, `tokens`, `context`; without `cluster` the list of clusters", shown=True),
    Endpoint("POST", ("/api/chat",), ollama.chat, "Ollama: chat; streams, tools, thinking, `format`",
             OllamaChat),
    Endpoint("POST", ("/api/generate",), ollama.generate, "Ollama: one prompt; `raw`, `suffix`, `context`",
             OllamaGenerate),
    Endpoint("POST", ("/api/embed",), ollama_models.embed, "Ollama: embeddings of texts", OllamaEmbed),
    Endpoint("POST", ("/api/embeddings",), ollama_models.embeddings, "Ollama: the embedding of one text",
             OllamaEmbedding),
    Endpoint("GET", ("/api/tags",), ollama_models.tags, "Ollama: list of the configured models"),
    Endpoint("POST", ("/api/show",), ollama_models.show, "Ollama: facts on a model", OllamaModel),
    Endpoint("GET", ("/api/ps",), ollama_models.loaded, "Ollama: list of the loaded models"),
    Endpoint("GET", ("/api/version",), ollama_models.version, "Ollama: version of its interface"),
    Endpoint("POST", ("/api/pull",), ollama_models.pull, "Ollama: download the files of a configured model",
             OllamaModel),
    Endpoint("DELETE", ("/api/delete",), ollama_models.delete, "Ollama: delete the files of a downloaded model; needs "
             "`deletable`", OllamaModel),
    Endpoint("POST", ("/api/create", "/api/copy", "/api/push"), ollama_models.refused, "Ollama: refused, as the models "
             "are those of the configuration"),
    Endpoint("POST", ("/infill",), infill, "fill-in-the-middle: text between `input_prefix` and `input_suffix`, for "
             "models with tokens for it", bodies.InfillRequest),
    Endpoint("POST", ("/translate",), texts.translate, "`text` (or a list), `source`, `target`, `num_beams`, "
             "`max_tokens`; encoder-decoders", bodies.TranslateRequest),
    Endpoint("POST", ("/fill-mask",), texts.fill_mask, "`text`, `top_k`; masked language models",
             bodies.FillMaskRequest),
    Endpoint("POST", ("/tokenize",), texts.tokenize, "token ids of `text`, `prompt`, `content` or `messages`",
             bodies.TokenizeRequest),
    Endpoint("POST", ("/detokenize",), texts.detokenize, "text of token ids", bodies.DetokenizeRequest),
    Endpoint("GET", ("/tokenizer_info",), status.tokenizer_info, "the first model (or `?model=`): special tokens, chat "
             "template"),
    Endpoint("POST", ("/apply-template",), texts.apply_template, "the prompt of messages, by the chat template",
             bodies.TemplateRequest),
    Endpoint("GET", ("/health/live",), status.live, "200 as long as the process answers; needs no key"),
    Endpoint("GET", ("/health", "/health/ready"), status.health, "200 when ready; 503 while models are loaded, while "
             "the service shuts down, and after the death of a model's device until the model is loaded again, with "
             "the reason; needs no key"),
    Endpoint("GET", ("/status",), status.status, "current state of engines and requests, as JSON"),
    Endpoint("GET", ("/props",), status.props, "the first model (or `?model=`): context, template, settings, slots"),
    Endpoint("GET", ("/slots",), slots.slots, "slots of the first model (or `?model=`), one per sequence of a batch"),
    Endpoint("POST", ("/slots/{id}",), slots.slot, "`?action=save`, `restore` or `erase` the KV cache of a slot's last "
             "text; `filename` is in `slot_folder`", bodies.SlotRequest),
    Endpoint("GET", ("/metrics",), status.metrics, "counters and histograms for Prometheus"),
    Endpoint("GET", ("/openapi.json",), schema, "OpenAPI description of all routes"),
)


def make_app(service: Service, routes: Sequence[Endpoint] | None = None) -> Guard:
    """The ASGI application. Models are loaded in the background; /health answers meanwhile.

    routes: the routes; None: ENDPOINTS.
    """
    config = service.config

    def bound(endpoint: Endpoint):
        async def handle(request: Request) -> Response:
            return await endpoint.handler(service, request)
        return handle

    endpoints = [e for e in routes or ENDPOINTS if config.page or not e.shown]
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        for path in endpoint.paths:
            by_path.setdefault(path, {})[endpoint.method] = endpoint
    table = [Route(path, _by_method({method: bound(endpoint) for method, endpoint in methods.items()}),
                   methods=list(methods)) for path, methods in by_path.items()]
    router = Router(table, redirect_slashes=False, lifespan=lambda app: _lifespan(service))
    inner = router if not config.cors_origins else CORSMiddleware(
        router, allow_origins=config.cors_origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
        expose_headers=["x-request-id", HEADER])
    hosts = (*config.allowed_hosts, *OWN_NAMES) if config.allowed_hosts or config.host in LOOPBACK else ()
    return Guard(inner, config.api_keys, hosts, config.cors_origins, service)


def _by_method(handlers: dict[str, Callable[[Request], Awaitable[Response]]]):
    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)
    return handle


@asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    loading, watching = asyncio.create_task(service.pool.preload()), asyncio.create_task(service.pool.watch())
    loading.add_done_callback(service.loaded)
    watching.add_done_callback(service.watched)
    try:
        yield
    finally:
        loading.cancel()
        watching.cancel()
        await service.pool.close()
        if service.traces is not None:
            await asyncio.to_thread(service.traces.close)
