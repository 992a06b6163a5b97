"""Loading and unloading of LoRA adapters over HTTP, if the configuration allows it (load_adapters)."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from numflow.engine.adapters.loaded import Adapters
from numflow.errors import FormatError, ModelNotFoundError
from numflow.server.http.errors import ApiError, bad_request, one_line
from numflow.server.messages.text_schemas import LoadAdapterRequest, UnloadAdapterRequest
from numflow.server.models.served import Served
from numflow.server.service.service import Service


async def load(service: Service, request: Request) -> PlainTextResponse:
    """POST /v1/load_lora_adapter."""
    _check_allowed(service)
    body = await service.read(request, LoadAdapterRequest)

    def work(served: Served) -> str:
        adapters = _adapters(served)
        try:
            adapters.load(body.lora_name, (body.lora_path, body.scale), fetch=False, in_place=body.load_inplace)
        except (FormatError, ModelNotFoundError) as error:  # a wrong path of the client is a 400
            raise bad_request(one_line(error), "lora_path", "adapter_not_loaded") from None
        return served.name

    name = await service.in_thread(request, body.model, work)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' is loaded: model '{name}:{body.lora_name}'\n")


async def unload(service: Service, request: Request) -> PlainTextResponse:
    """POST /v1/unload_lora_adapter. Running requests with the adapter continue to their end."""
    _check_allowed(service)
    body = await service.read(request, UnloadAdapterRequest)

    def work(served: Served) -> None:
        adapters = _adapters(served)
        if body.lora_name not in adapters:
            raise ApiError(404, f"{served.name} has no adapter {body.lora_name!r:.200}; adapters: "
                           f"{', '.join(adapters) or 'none'}", param="lora_name", code="adapter_not_found")
        adapters.unload(body.lora_name)

    await service.in_thread(request, body.model, work)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' is unloaded\n")


def _check_allowed(service: Service) -> None:
    if not service.config.load_adapters:
        raise ApiError(403, "loading adapters over HTTP is off: [service] load_adapters = true turns it on",
                       code="not_allowed")


def _adapters(served: Served) -> Adapters:
    if served.model.adapters is None:
        raise bad_request(f"the adapters of {served.name} are merged; requests cannot choose one", "model",
                          "unsupported")
    return served.model.adapters
