"""Ollama's routes for models: lists, facts, embeddings, downloading and deleting."""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import numflow
from numflow import registry
from numflow.errors import NumflowError
from numflow.registry import catalogue, store
from numflow.registry.paths import models_dir
from numflow.server.config.config import ModelConfig
from numflow.server.http.errors import ApiError, bad_request
from numflow.server.messages.ollama_schemas import OllamaEmbed, OllamaEmbedding, OllamaModel
from numflow.server.messages.wire import Json, dump, dump_long
from numflow.server.models.facts import FileFacts, file_facts, quantisation
from numflow.server.models.served import Served
from numflow.server.service.service import Service

LONG = timedelta(days=365)  # expiry of models without a time limit
UNKNOWN = "0001-01-01T00:00:00Z"
VERSION = "0.12.0"  # version of Ollama's interface that is implemented; clients check it


def tag(name: str) -> str:
    """A model's name with a tag, which all names in Ollama have."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


async def version(service: Service, request: Request) -> Json:
    """Versions of the interface and of numflow."""
    return Json({"version": VERSION, "numflow": numflow.__version__})


async def tags(service: Service, request: Request) -> Json:
    """List all models."""
    listed = [(config, await asyncio.to_thread(file_facts, config)) for config, *_ in service.pool.listing()]
    return Json({"models": [_entry(config, facts) for config, facts in listed]})


async def loaded(service: Service, request: Request) -> Json:
    """List the loaded models."""
    found = []
    for config, served, _ in service.pool.listing():
        if served is not None:
            entry = _entry(config, await asyncio.to_thread(file_facts, config))
            expires = (datetime.now(UTC) + LONG).isoformat()
            of_gpu = config.load.get("backend") == "cuda"
            found.append(entry | {"size": served.nbytes, "size_vram": served.nbytes if of_gpu else 0,
                                  "expires_at": expires, "context_length": served.model.context})
    return Json({"models": found})


async def show(service: Service, request: Request) -> Json:
    """Facts on one model."""
    body = await service.read(request, OllamaModel)
    name = service.pool.find(body.model or body.name)
    config, served, _ = next(one for one in service.pool.listing() if one[0].name == name)
    facts = await asyncio.to_thread(file_facts, config)
    info: dict[str, Any] = {}
    able = ["completion"]
    if facts is not None:
        able = ["completion"] if facts.kind == "decoder" else ["embedding"]
        info = {"general.architecture": facts.family, "general.parameter_count": facts.parameters,
                f"{facts.family}.context_length": facts.context}
    if served is not None:
        able = [one for one in served.capabilities if one != "chat"]
        if facts is not None:
            info[f"{facts.family}.context_length"] = served.model.context
    entry = _entry(config, facts)
    return Json({"modelfile": f"FROM {config.path}\n", "parameters": _parameters(served),
                 "template": (served.chat_template if served is not None else None) or "", "license": "",
                 "details": entry["details"], "model_info": info, "capabilities": able,
                 "modified_at": entry["modified_at"]})


def _parameters(served: Served | None) -> str:
    """Default sampling settings of a conversation, as text in two columns."""
    if served is None or not served.generates:
        return ""
    return "\n".join(f"{name:<30} {value}" for name, value in served.sampling.items())


def _entry(config: ModelConfig, facts: FileFacts | None) -> dict[str, Any]:
    name = tag(config.name)
    return {"name": name, "model": name, "modified_at": facts.modified if facts else UNKNOWN,
            "size": facts.size if facts else 0, "digest": facts.digest if facts else "",
            "details": {"parent_model": "", "format": facts.format if facts else "",
                        "family": facts.family if facts else "", "families": [facts.family] if facts else [],
                        "parameter_size": facts.short if facts else "",
                        "quantization_level": quantisation(config, facts) if facts else ""}}


async def embed(service: Service, request: Request) -> Json:
    """Embeddings of texts, normalised to length 1."""
    begin, body = time.perf_counter(), await service.read(request, OllamaEmbed)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not all(texts):
        raise bad_request("input has an empty text", "input")

    def work(served: Served) -> bytes:
        vectors, tokens = _vectors(served, texts, body.truncate is not False, body.dimensions) if texts else ([], 0)
        return dump_long({"model": served.name, "embeddings": vectors, "load_duration": 0, "prompt_eval_count": tokens,
                          "total_duration": int((time.perf_counter() - begin) * 1e9)})

    return Json(await service.in_thread(request, body.model, work, computes=True))


async def embeddings(service: Service, request: Request) -> Json:
    """The embedding of one text."""
    body = await service.read(request, OllamaEmbedding)

    def work(served: Served) -> dict[str, Any]:
        return {"embedding": _vectors(served, [body.prompt], True)[0][0] if body.prompt else []}

    return Json(await service.in_thread(request, body.model, work, computes=True))


def _vectors(served: Served, texts: Sequence[str], truncate: bool,
             dimensions: int | None = None) -> tuple[list[list[float]], int]:
    """Embeddings, and the number of tokens of all texts. dimensions: 0 or None: all."""
    vectors = served.model.embed(list(texts), truncate=truncate, dimensions=dimensions or None)
    return vectors.tolist(), sum(len(served.tokenizer.encode(text)) for text in texts)


def _named(service: Service, body: OllamaModel) -> ModelConfig:
    """The model that a request names.

    Raises:
        ApiError: the configuration has no such model.
    """
    given = body.model or body.name or ""
    name = service.pool.named(given)
    if name is None:
        raise ApiError(404, f"there is no model {given!r:.200}: this service has only the models of its configuration",
                       param="model", code="model_not_found")
    return next(config for config, *_ in service.pool.listing() if config.name == name)


async def pull(service: Service, request: Request) -> Response:
    """Download the files of a configured model, unless they are on this disk."""
    body = await service.read(request, OllamaModel)
    config = _named(service, body)

    async def fetch() -> None:
        await asyncio.to_thread(registry.resolve, config.path, progress=False)

    async def lines() -> AsyncGenerator[bytes, None]:
        yield dump({"status": "pulling manifest"}) + b"\n"
        await fetch()
        yield dump({"status": "success"}) + b"\n"

    if body.stream:
        return service.stream(request, lines(), lambda: None, media_type="application/x-ndjson")
    await service.jobs.run(request.receive, fetch())
    return Json({"status": "success"})


async def refused(service: Service, request: Request) -> Response:
    """Refuse to create, copy or push a model."""
    raise bad_request("this service has only the models of its configuration: it cannot create, copy or push models",
                      "model", "unsupported")


async def delete(service: Service, request: Request) -> Response:
    """Delete the files of a downloaded model, if the configuration allows it."""
    config = _named(service, await service.read(request, OllamaModel))
    if not service.config.deletable:
        raise ApiError(403, "this service deletes no models: the option deletable is off", code="not_deletable")
    entry = catalogue.find(config.path)
    folder = store.installed(entry) if entry is not None else None
    if entry is None or folder is None or models_dir().resolve() not in folder.resolve().parents:
        raise bad_request(f"{config.name} is no model that numflow has downloaded by name: {config.path} is kept",
                          "model", "unsupported")
    if not await service.pool.unload(config.name):
        raise ApiError(409, f"{config.name} is in use; try again later", param="model", code="model_in_use")
    try:
        await asyncio.to_thread(shutil.rmtree, models_dir() / entry.name)
    except OSError as error:
        raise NumflowError(f"{config.name} cannot be deleted: {error.strerror}") from None
    return Response(status_code=200)
