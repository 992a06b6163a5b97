"""Routes with facts on the service: health, status, models, metrics."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import numflow
from numflow.engine.adapters.given import by_request, named
from numflow.engine.options import EngineOptions
from numflow.server.http.errors import MOST, ApiError, one_line
from numflow.server.messages.wire import Json
from numflow.server.models.facts import file_facts, quantisation
from numflow.server.models.served import Served
from numflow.server.service.service import Service


async def health(service: Service, request: Request) -> Json:
    """GET /health: 200 when requests are served; 503 while models are loaded, during shutdown, and from the death of a
    model's device until the model is loaded again, with the reason."""
    if service.draining:
        return Json({"status": "shutting down"}, 503)
    if not service.pool.ready:
        return Json({"status": "loading"}, 503, {"Retry-After": "2"})
    failing = service.pool.failing()
    if failing:
        return Json({"status": "failed", "models": {name: why[:MOST] for name, why in failing.items()}}, 503,
                    {"Retry-After": "2"})
    return Json({"status": "ok"})


async def live(service: Service, request: Request) -> Json:
    """GET /health/live: 200 as long as this process answers, whatever the state of the models."""
    return Json({"status": "ok"})


async def status(service: Service, request: Request) -> Json:
    """GET /status."""
    return Json(status_of(service))


def status_of(service: Service) -> dict[str, Any]:
    """Current state of models, engines and requests."""
    models = []
    for config, served, failed in service.pool.listing():
        entry: dict[str, Any] = {"id": config.name, "loaded": served is not None,
                                 "error": one_line(failed) if failed is not None else None}
        if served is not None and served.failure:
            entry["error"] = served.failure
        elif served is not None:
            entry |= {"bytes": served.nbytes, "context": served.model.context, "load_s": round(served.model.load_s, 3),
                      "fingerprint": served.fingerprint, "writes_text": served.generates,
                      "engine": served.engine.stats if served.engine is not None else None}
        models.append(entry)
    return {"version": numflow.__version__, "uptime_s": round(time.time() - service.started, 1),
            "requests": len(service.jobs), "draining": service.draining, "models": models}


async def models(service: Service, request: Request) -> Json:
    """GET /v1/models, with additional fields for Anthropic's client."""
    data = [entry for config, *_ in service.pool.listing()
            for entry in _with_adapters(service, await _entry(service, config.name))]
    return Json({"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"],
                 "last_id": data[-1]["id"]})


async def model(service: Service, request: Request) -> Json:
    """GET /v1/models/{id}; an id may contain slashes."""
    id = request.path_params["id"]
    found = _with_adapters(service, await _entry(service, service.pool.find(id)))
    return Json(next((entry for entry in found if entry["id"] == id), found[0]))


def _with_adapters(service: Service, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry of a model, and an entry for each adapter that requests may choose."""
    config, found, _ = next(one for one in service.pool.listing() if one[0].name == entry["id"])
    given = by_request(config.load.get("adapters"), config.load.get("merge")) or {}
    adapters = named(given) if found is None else found.model.adapters or {}
    return [entry, *({**entry, "id": (id := f"{entry['id']}:{name}"), "display_name": id, "parent": entry["id"],
                      "root": str(adapter.path)} for name, adapter in adapters.items())]


async def _entry(service: Service, name: str) -> dict[str, Any]:
    """A model's entry in OpenAI's list, with further facts. chats: whether the model answers messages."""
    config, found, _ = next(one for one in service.pool.listing() if one[0].name == name)
    since = datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry: dict[str, Any] = {"id": name, "object": "model", "created": int(service.started), "owned_by": "numflow",
                             "type": "model", "display_name": name, "created_at": since, "loaded": found is not None}
    facts = await asyncio.to_thread(file_facts, config)
    if facts is not None:
        entry |= {"max_model_len": facts.context, "chats": facts.kind == "decoder",
                  "family": facts.family, "parameters": facts.parameters, "size": facts.size,
                  "quantization": quantisation(config, facts)}
    if found is not None:
        entry |= {"max_model_len": found.model.context, "chats": found.chats, "capabilities": found.capabilities}
        entry |= {"sampling": found.sampling} if found.generates else {}
    return entry


async def props(service: Service, request: Request) -> Json:
    """GET /props: properties of the first model, or of the model in the query."""
    served = await loaded(service, request)
    texts = served.tokenizer.special_texts()
    return Json({"default_generation_settings": {"n_ctx": served.model.context, "params": dict(served.sampling)},
                 "total_slots": served.config.engine.get("max_batch", EngineOptions.max_batch),
                 "model_alias": served.name, "model_path": str(served.config.path),
                 "chat_template": served.chat_template or "", "bos_token": texts.get("bos_token", ""),
                 "eos_token": texts.get("eos_token", ""), "modalities": {"vision": False, "audio": False},
                 "build_info": f"numflow {numflow.__version__}", "is_sleeping": False})


async def tokenizer_info(service: Service, request: Request) -> Json:
    """GET /tokenizer_info: special tokens and chat template of the first model, or of the model in the query."""
    served = await loaded(service, request)
    return Json({"model": served.name, "model_max_length": served.model.context,
                 "chat_template": served.chat_template, **served.tokenizer.special_texts()})


async def loaded(service: Service, request: Request) -> Served:
    """The first model, or the model in the query, which must be loaded and generate text."""
    name = service.pool.find(request.query_params.get("model"))
    served = next(found for config, found, _ in service.pool.listing() if config.name == name)
    if served is None:
        raise ApiError(503, f"{name} is not loaded", param="model", code="model_unavailable",
                       headers={"Retry-After": "2"})
    served.need_engine()
    return served


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(service.metrics.text(), media_type=service.metrics.content_type)
