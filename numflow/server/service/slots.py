"""Slots of a model: save, restore and erase the KV cache of a slot's last text, in files of one folder."""

import re
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from numflow import places
from numflow.engine.options import EngineOptions
from numflow.errors import NumflowError, RequestError
from numflow.server.http.errors import ApiError, bad_request, one_line
from numflow.server.messages.text_schemas import SlotRequest
from numflow.server.messages.wire import Json
from numflow.server.models.served import Served
from numflow.server.service.service import Service
from numflow.server.service.status import loaded

ACTIONS = ("save", "restore", "erase")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ID = re.compile(r"[0-9]{1,9}")


async def slots(service: Service, request: Request) -> Json:
    """GET /slots: one slot per sequence of a batch. The first ones are shown as processing."""
    served = await loaded(service, request)
    running, count = served.need_engine().stats["sequences"], served.config.engine.get(
        "max_batch", EngineOptions.max_batch)
    return Json([{"id": slot, "n_ctx": served.model.context, "is_processing": slot < running}
                 for slot in range(count)])


async def slot(service: Service, request: Request) -> Json:
    """POST /slots/{id}?action=save, restore or erase."""
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    body = SlotRequest() if empty else await service.read(request, SlotRequest)
    action = request.query_params.get("action", "")
    if action not in ACTIONS:
        raise bad_request(f"action should be one of {', '.join(ACTIONS)}, is {action!r:.80}", "action")
    text = request.path_params["id"]
    if not _ID.fullmatch(text):
        raise ApiError(404, f"there is no slot {text!r:.80}", param="id", code="slot_not_found")
    id, owner = int(text), request.state.owner
    path = None if action == "erase" else _path(service, body.filename, owner)

    def work(served: Served) -> dict[str, Any]:
        return _done(service, served, action, id, path, owner)

    return Json(await service.in_thread(request, body.model or request.query_params.get("model"), work))


def _done(service: Service, served: Served, action: str, id: int, path: Path | None, owner: str) -> dict[str, Any]:
    engine, begin = served.need_engine(), time.perf_counter()
    if path is None:
        return {"id_slot": id, "n_erased": engine.erase_session(id, owner)}
    try:
        if action == "save":
            _check_room(service, path)
            found = engine.save_session(path, id, None, owner)
            numbers = {"n_saved": found.tokens, "n_written": found.nbytes}
        else:
            if not path.is_file():
                raise ApiError(404, f"there is no file {path.name!r}", param="filename", code="file_not_found")
            found = engine.restore_session(path, id, owner)
            numbers = {"n_restored": found.tokens, "n_read": found.nbytes}
    except NumflowError as error:
        error.args = (one_line(error).replace(str(path), path.name),)  # hides the folder's path from clients
        raise
    ms = round(1000 * (time.perf_counter() - begin), 3)
    return {"id_slot": id, "filename": path.name, **numbers, "n_cached": found.cached, "timings": {f"{action}_ms": ms}}


def _path(service: Service, name: str | None, owner: str) -> Path:
    """The path of a file in slot_folder, in a sub-folder of the API key.

    Raises:
        ApiError: saving is off, or the file name is not valid.
    """
    folder = service.config.slot_folder
    if not folder:
        raise ApiError(403, "saving slots is off: [service] slot_folder = DIR (--slot-save-path DIR) turns it on",
                       code="not_allowed")
    if name is None:
        raise bad_request("filename is missing", "filename", "missing_field")
    if not _NAME.fullmatch(name) or name.endswith(".part"):
        raise bad_request("filename should have at most 128 characters: letters, digits, '_', '-' and '.'", "filename")
    try:
        places.make(subfolder := Path(folder) / re.sub(r"\W", "-", owner))
    except OSError as error:
        raise RequestError(f"slot_folder: {error.strerror}") from None
    return subfolder / name


def _check_room(service: Service, path: Path) -> None:
    """Check that slot_folder is not full.

    Raises:
        ApiError: its files have reached slot_disk.
    """
    found = sum(file.stat().st_size for file in Path(service.config.slot_folder).glob("**/*")
                if file != path and file.is_file())
    if found >= service.config.slot_disk:
        raise bad_request(f"the saved slots have {found} bytes already; the limit is {service.config.slot_disk} "
                          "(slot_disk)", "filename", "no_room")
