"""OpenAI's Responses: POST /v1/responses, and the routes of stored responses."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.server.http.errors import ApiError, bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.logprobs import chat_entries
from numflow.server.messages.reply import ReplyPart
from numflow.server.messages.responses_schemas import ResponsesInput, ResponsesItem, ResponsesRequest
from numflow.server.messages.schemas import ChatRequest
from numflow.server.messages.wire import Json, dump, named_event
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import prepare
from numflow.server.protocols.responses_items import Event, ResponseOutput, Tools, messages_of_items, new_id, tools_of
from numflow.server.protocols.talk import ReplyChoice, Talk, chat_request
from numflow.server.service.service import Answer, Generating, Service
from numflow.server.service.store import PassedResponses, ResponseStore, StoredResponse

LOGPROBS = "message.output_text.logprobs"  # a value of `include`
MOST_LISTED = 100  # largest number of items in one list


async def responses(service: Service, request: Request) -> Response:
    """Answer a conversation of items."""
    return await service.answer(request, ResponsesRequest, _Answer)


async def count(service: Service, request: Request) -> Json:
    """Number of tokens of a response's input."""
    body = await service.read(request, ResponsesInput)
    ignored, items = request.state.ignored, _items(service, request, body)
    tools = tools_of(body, ignored)

    def work(served: Served) -> int:
        chat = chat_request(ResponsesRequest(), ignored, _fields(body, items, tools, ignored))
        return len(prepare(served, chat, True, ignored).ids)

    return Json({"object": "response.input_tokens",
                 "input_tokens": await service.in_thread(request, body.model, work)})


async def stored(service: Service, request: Request) -> Json:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise bad_request("a stored response cannot be streamed", "stream", "unsupported")
    return Json(_stored(service, request).response)


async def forget(service: Service, request: Request) -> Json:
    """Delete a stored response."""
    id = _stored(service, request).response["id"]
    service.responses.delete(_owner(request), id)
    return Json({"id": id, "object": "response.deleted", "deleted": True})


async def input_items(service: Service, request: Request) -> Json:
    """List the input items of a stored response."""
    items, given = list(_stored(service, request).before), request.query_params
    limit, order, after = given.get("limit", "20"), given.get("order", "desc"), given.get("after")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST_LISTED:
        raise bad_request(f"limit should be 1 .. {MOST_LISTED}", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise bad_request("order should be asc or desc", "order", "invalid_value")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if index is None:
            raise bad_request("after names no item of this response's input", "after", "invalid_value")
        items = items[index + 1:]
    page = items[:int(limit)]
    return Json({"object": "list", "data": page, "first_id": page[0]["id"] if page else None,
                 "last_id": page[-1]["id"] if page else None, "has_more": len(page) < len(items)})


def _owner(request: Request) -> str:
    return getattr(request.state, "owner", "")


def _store(service: Service, request: Request) -> ResponseStore | PassedResponses:
    """The store of responses; in a replica the stored responses that the front has sent with the request."""
    return getattr(request.state, "responses", service.responses)


def _stored(service: Service, request: Request) -> StoredResponse:
    id = request.path_params["id"]
    found = service.responses.get(_owner(request), id)
    if found is None:
        raise ApiError(404, f"there is no stored response {id!r:.100}: it was not stored, or was deleted or dropped",
                       param="id", code="response_not_found")
    return found


def _items(service: Service, request: Request, body: ResponsesInput) -> list[dict[str, Any]]:
    """All items of the conversation, beginning with those of the previous response; each has an id.

    Raises:
        ApiError: there are no items, or the previous response is not stored.
    """
    for name in ("conversation", "prompt"):
        if getattr(body, name, None) is not None:
            raise bad_request(f"{name} is not supported: send the items, or previous_response_id", name, "unsupported")
    before: Sequence[dict[str, Any]] = ()
    store = _store(service, request)
    if body.previous_response_id is not None:
        if not store.keeps:
            raise bad_request("this service stores no responses (max_responses = 0): send the items of the whole "
                              "conversation", "previous_response_id", "unsupported")
        found = store.get(_owner(request), body.previous_response_id)
        if found is None:
            raise bad_request(f"there is no stored response {body.previous_response_id!r:.100}: it was not stored, or "
                              "was deleted or dropped", "previous_response_id", "previous_response_not_found")
        before = found.items
    if isinstance(body.input, str):
        new = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        new = [_item(store, _owner(request), item, f"input[{index}]") for index, item in enumerate(body.input or [])]
    if not new and not before:
        raise bad_request("input is missing", "input", "missing_field")
    return [*before, *({"id": new_id("item"), **item} for item in new)]


def _item(store: ResponseStore | PassedResponses, owner: str, item: ResponsesItem, place: str) -> dict[str, Any]:
    """An item of the input. A reference is replaced by the stored item that it names.

    Raises:
        ApiError: there is no such item.
    """
    given = item.model_dump(exclude_none=True)
    if item.type != "item_reference" and given.keys() != {"id"}:
        return given
    found = store.item(owner, item.id or "")
    if found is None:
        raise bad_request(f"{place} refers to {item.id or ''!r:.100}, which is not stored: its response was not "
                          "stored, or was deleted or dropped", f"{place}.id", "item_not_found")
    return found


def _fields(body: ResponsesInput, items: Sequence[dict[str, Any]], tools: Tools, ignored: Ignored) -> dict[str, Any]:
    """Fields of a chat request."""
    messages = messages_of_items([ResponsesItem.model_validate(item) for item in items])
    if body.instructions:  # templates expect one system message, at the beginning
        leading = next((index for index, one in enumerate(messages) if one["role"] not in ("system", "developer")),
                       len(messages))
        system = "\n\n".join([body.instructions, *(one["content"] for one in messages[:leading])])
        messages = [{"role": "system", "content": system}, *messages[leading:]]
    if not messages:
        raise bad_request("input has no message", "input", "missing_field")
    form, reasoning = body.text.format if body.text else None, body.reasoning
    if reasoning is not None and reasoning.summary is not None:
        ignored.add("reasoning.summary", "reasoning.summary has no effect: the whole thinking text is returned")
    if body.text is not None and body.text.verbosity is not None:
        ignored.add("text.verbosity", "text.verbosity has no effect on these models")
    shape = None
    if form is not None and form.type != "text":
        content = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        shape = {"type": form.type, **({"json_schema": content} if form.type == "json_schema" else {})}
    return {"messages": messages, "tools": tools.functions or None, "tool_choice": tools.choice,
            "parallel_tool_calls": body.parallel_tool_calls, "response_format": shape,
            "overflow": {"auto": "drop", "disabled": "refuse"}.get(body.truncation or ""),
            "reasoning_effort": reasoning.effort if reasoning else None}


class _Answer(Answer):
    """The response to one request."""

    def __init__(self, service: Service, running: Generating, body: ResponsesRequest):
        if body.background:
            raise bad_request("background is not supported: use a stream, or wait for the answer", "background",
                              "unsupported")
        self._service, self._running, self._body = service, running, body
        self._number = 0
        self._talk: Talk

    async def start(self) -> None:
        chat = await asyncio.to_thread(self._chat)
        self._talk = Talk(self._service, self._running, chat, pieces=bool(self._body.stream))
        await self._talk.start()

    def _chat(self) -> ChatRequest:
        body, ignored = self._body, self._running.ignored
        self._running.served.need_engine()
        self._items = _items(self._service, self._running.request, body)
        try:
            self._size = len(dump(self._items)) + len(dump(body.model_dump(exclude={"input"})))
        except ValueError:
            raise bad_request("the request has a number that JSON does not have", code="invalid_json") from None
        self._tools = tools_of(body, ignored)
        self._output = ResponseOutput(self._tools.known)
        self._response = self._empty()
        logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or [])
        for name in body.include or []:
            if name != LOGPROBS:
                ignored.add(f"include.{name}", f"include: answers have no {name:.80}")
        if body.max_tool_calls is not None:
            ignored.add("max_tool_calls", "max_tool_calls has no effect: the service itself runs no tools")
        return chat_request(body, ignored, {
            **_fields(body, self._items, self._tools, ignored), "max_tokens": body.max_output_tokens,
            "temperature": body.temperature, "top_p": body.top_p, "logprobs": logprobs or None,
            "top_logprobs": body.top_logprobs if logprobs else None})

    def _empty(self) -> dict[str, Any]:
        """The response object before any output."""
        body, sampling = self._body, self._running.served.sampling
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "text", "reasoning", "tool_choice"})
        return {
            "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "max_tool_calls": body.max_tool_calls,
            "model": self._running.served.name, "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "safety_identifier": body.safety_identifier, "service_tier": "default",
            "store": _store(self._service, self._running.request).keeps and body.store is not False,
            "temperature": sampling.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"), "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled", "usage": None, "user": body.user,
            "metadata": body.metadata or {}}

    async def finish(self) -> None:
        await self._talk.finish(self._reply_events)

    def whole(self) -> dict[str, Any]:
        """The complete response, assembled by the same code as the stream's events."""
        choice, = self._talk.ended()
        self._reply_events(choice, choice.last)
        self._end(choice)
        return self._response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response in server-sent events."""
        yield self._events([(f"response.{kind}", {"response": self._response}) for kind in ("created", "in_progress")])
        async for fed in self._talk.parts():
            if events := [event for choice, parts in fed for event in self._reply_events(choice, parts)]:
                yield self._events(events)
        choice, = self._talk.ended()
        events = [*self._reply_events(choice, choice.last), *self._end(choice)]
        yield self._events([*events, (f"response.{self._response['status']}", {"response": self._response})])

    def failed(self, error: ApiError) -> bytes:
        self._response |= {"status": "failed", "output": self._output.items,
                           "error": {"code": error.code or "server_error", "message": error.message}}
        return self._events([("response.failed", {"response": self._response})])

    def _reply_events(self, choice: ReplyChoice, parts: Sequence[ReplyPart]) -> list[Event]:
        """Take parts of the reply; return their events. A text has the log-probabilities since the text before."""
        events: list[Event] = []
        for part in parts:
            logprobs = chat_entries(self._running.served.tokenizer, choice.new_logprobs())
            events += self._output.take(part, logprobs if part.kind == "content" else ())
        return events

    def _end(self, choice: ReplyChoice) -> list[Event]:
        """Complete the response; return the remaining events."""
        cut = choice.result.finish_reason == "length"
        events = list(self._output.end("incomplete" if cut else "completed"))
        usage = self._running.usage()
        self._response |= {
            "status": "incomplete" if cut else "completed", "output": self._output.items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": {
                "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": choice.thought}, "total_tokens": usage["total_tokens"]}}
        if not cut:
            self._response["completed_at"] = int(time.time())
        if self._response["store"]:
            size = self._size + len(dump(self._output.items))
            request = self._running.request
            _store(self._service, request).put(_owner(request),
                                               StoredResponse(self._response, tuple(self._items), size))
        return events

    def _events(self, events: Sequence[Event]) -> bytes:
        begin, self._number = self._number, self._number + len(events)
        return b"".join(named_event(kind, {"type": kind, "sequence_number": number, **fields})
                        for number, (kind, fields) in enumerate(events, begin))
