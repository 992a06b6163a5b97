"""Facts about the service: health, status, models, counters."""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import numflow
from numflow.server.http.errors import MOST, one_line
from numflow.server.messages.wire import Json
from numflow.server.models.served import may_chat
from numflow.server.service.service import Service


async def health(service: Service, request: Request) -> Json:
    """GET /health: 200 when requests are served; 503 while models load, while the service ends, and from the moment
    that a model's device has died until the model is loaded again, with the reason."""
    if service.draining:
        return Json({"status": "shutting down"}, 503)
    if not service.pool.ready:
        return Json({"status": "loading"}, 503, {"Retry-After": "2"})
    failing = service.pool.failing()
    if failing:
        return Json({"status": "failed", "models": {name: why[:MOST] for name, why in failing.items()}}, 503,
                    {"Retry-After": "2"})
    return Json({"status": "ok"})


async def status(service: Service, request: Request) -> Json:
    """GET /status."""
    return Json(status_of(service))


def status_of(service: Service) -> dict[str, Any]:
    """Models, engines and requests at this moment."""
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
    """GET /v1/models."""
    return Json({"object": "list", "data": [await _entry(service, config.name)
                                            for config, *_ in service.pool.listing()]})


async def model(service: Service, request: Request) -> Json:
    """GET /v1/models/{id}; ids may have slashes."""
    return Json(await _entry(service, service.pool.find(request.path_params["id"])))


async def _entry(service: Service, name: str) -> dict[str, Any]:
    """A model as OpenAI lists it; chats: whether it answers messages, where that is known."""
    config, found, _ = next(one for one in service.pool.listing() if one[0].name == name)
    entry: dict[str, Any] = {"id": name, "object": "model", "created": int(service.started), "owned_by": "numflow"}
    if found is not None:
        entry |= {"max_model_len": found.model.context, "chats": found.chats}
        return {**entry, "sampling": found.sampling} if found.generates else entry
    chats = await asyncio.to_thread(may_chat, config)
    return entry if chats is None else {**entry, "chats": chats}


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(service.metrics.text(), media_type=service.metrics.content_type)
