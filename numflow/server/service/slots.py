"""Slots of a model: the texts that they had last, saved to files of one folder, restored and erased."""

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
    """GET /slots: places for sequences that run side by side, of which the first ones are taken."""
    served = await loaded(service, request)
    running, count = served.need_engine().stats["sequences"], served.config.engine.get(
        "max_batch", EngineOptions.max_batch)
    return Json([{"id": at, "n_ctx": served.model.context, "is_processing": at < running} for at in range(count)])


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
    place, owner = int(text), request.state.owner
    path = None if action == "erase" else _path(service, body.filename, owner)

    def work(served: Served) -> dict[str, Any]:
        return _done(service, served, action, place, path, owner)

    return Json(await service.in_thread(request, body.model or request.query_params.get("model"), work))


def _done(service: Service, served: Served, action: str, place: int, path: Path | None, owner: str) -> dict[str, Any]:
    engine, begin = served.need_engine(), time.perf_counter()
    if path is None:
        return {"id_slot": place, "n_erased": engine.erase_session(place, owner)}
    try:
        if action == "save":
            _check_room(service, path)
            found = engine.save_session(path, place, None, owner)
            told = {"n_saved": found.tokens, "n_written": found.nbytes}
        else:
            if not path.is_file():
                raise ApiError(404, f"there is no file {path.name!r}", param="filename", code="file_not_found")
            found = engine.restore_session(path, place, owner)
            told = {"n_restored": found.tokens, "n_read": found.nbytes}
    except NumflowError as error:
        error.args = (one_line(error).replace(str(path), path.name),)  # where the folder is is no affair of clients
        raise
    ms = round(1000 * (time.perf_counter() - begin), 3)
    return {"id_slot": place, "filename": path.name, **told, "n_cached": found.cached, "timings": {f"{action}_ms": ms}}


def _path(service: Service, name: str | None, owner: str) -> Path:
    """A file of the folder, of each API key in a folder of its own.

    Raises:
        ApiError: nothing is saved here, or the name is no plain one.
    """
    folder = service.config.slot_folder
    if not folder:
        raise ApiError(403, "slots are not saved here: [service] slot_folder = DIR (--slot-save-path DIR) allows it",
                       code="not_allowed")
    if name is None:
        raise bad_request("filename is missing", "filename", "missing_field")
    if not _NAME.fullmatch(name) or name.endswith(".part"):
        raise bad_request("filename should be a plain name of letters, digits, '_', '-' and '.', at most 128 of them",
                          "filename")
    try:
        places.make(place := Path(folder) / re.sub(r"\W", "-", owner))
    except OSError as error:
        raise RequestError(f"slot_folder: {error.strerror}") from None
    return place / name


def _check_room(service: Service, path: Path) -> None:
    """Refuse to save more when the folder is full.

    Raises:
        ApiError: its files have reached slot_disk.
    """
    found = sum(file.stat().st_size for file in Path(service.config.slot_folder).glob("**/*")
                if file != path and file.is_file())
    if found >= service.config.slot_disk:
        raise bad_request(f"the files of slots have {found} bytes already, the limit is {service.config.slot_disk} "
                          "(slot_disk)", "filename", "no_room")
