"""GET /explore and its JSON routes. All work is done in the service's threads, not on its event loop."""

from starlette.requests import Request
from starlette.responses import Response

from numflow.server.explore.quantisation import explored, schemes, tensors
from numflow.server.explore.roofline import roofline
from numflow.server.explore.timeline import choices, timeline
from numflow.server.http import pages
from numflow.server.http.errors import bad_request
from numflow.server.messages.wire import Json
from numflow.server.models.served import Served
from numflow.server.service.service import Service


async def page(service: Service, request: Request) -> Response:
    """GET /explore: the page."""
    return pages.answer("explore.html")


async def kv(service: Service, request: Request) -> Json:
    """Current KV blocks, requests and prefix tree of a model."""
    return await _looked(service, request, lambda served: served.need_engine().snapshot())


async def quantisation(service: Service, request: Request) -> Json:
    """A tensor quantised with a scheme; without `tensor` the lists of tensors and schemes."""
    query = request.query_params
    name, scheme, row = query.get("tensor"), query.get("scheme", "q3h"), _whole(query.get("row", "0"), "row")

    def look(served: Served) -> dict:
        path = str(served.config.path)
        if name is None:
            return {"tensors": tensors(path), "schemes": schemes()}
        return explored(path, name, scheme[:100], row)

    return await _looked(service, request, look)


async def limits(service: Service, request: Request) -> Json:
    """Roofline of this machine, with the ops of the last request."""
    return await _looked(service, request, roofline)


async def partitions(service: Service, request: Request) -> Json:
    """Timeline of a model on a cluster; without `cluster` the list of clusters."""
    query = request.query_params
    sizes = [_whole(query.get(name, default), name) for name, default in (("batch", "1"), ("tokens", "1"),
                                                                          ("context", "512"))]

    def look(served: Served) -> dict:
        if "cluster" not in query:
            return {"clusters": choices()}
        return timeline(str(served.config.path), served.config.load.get("spec"), query["cluster"],
                        query.get("devices", "0"), *sizes)

    return await _looked(service, request, look)


async def _looked(service: Service, request: Request, look) -> Json:
    return Json(await service.in_thread(request, request.query_params.get("model"), look))


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise bad_request(f"{name} should be a whole number from 0, is {text!r:.50}", name, "invalid_value")
    return int(text)
