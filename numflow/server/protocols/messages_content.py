"""Content of Anthropic's Messages: blocks to messages, tools to functions, parts of a reply to blocks and events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numflow.errors import quoted
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.messages_schemas import CountRequest, MessageBlock, MessagesTool, MessageTurn
from numflow.server.messages.reply import ReplyPart

Event = tuple[str, dict[str, Any]]  # its type, and its fields beside the type
THOUGHTS = ("thinking", "redacted_thinking")


def messages_of_turns(turns: Sequence[MessageTurn],
                      system: str | list[MessageBlock] | None) -> tuple[list[dict[str, Any]], str]:
    """Messages of a chat request, and the text that the answer goes on from, which a last turn of the assistant is.

    Raises:
        ApiError: a block that is not complete, or that models here cannot read.
    """
    told = system if isinstance(system, str) else "\n\n".join(_texts(system or [], "system"))
    found: list[dict[str, Any]] = [{"role": "system", "content": told}] if told else []
    for at, turn in enumerate(turns):
        content = [MessageBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        read = _assistant if turn.role == "assistant" else _user
        found += read(turn.role, content, f"messages[{at}].content")
    begun = ""
    if turns[-1].role == "assistant" and not found[-1].get("tool_calls"):
        begun = found.pop()["content"] or ""
    if not found:
        raise bad_request("messages has no message of the user", "messages", "missing_field")
    return found, begun


def _user(role: str, blocks: Sequence[MessageBlock], place: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before and after the text around them."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            found.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for at, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_block_text(block, f"{place}[{at}]"))
            continue
        say()
        if block.tool_use_id is None:
            raise bad_request(f"{place}[{at}].tool_use_id is missing", f"{place}[{at}].tool_use_id", "missing_field")
        text = _result(block.content, f"{place}[{at}].content")
        found.append({"role": "tool", "tool_call_id": block.tool_use_id,
                      "content": f"Error: {text}" if block.is_error else text})
    say()
    return found or [{"role": role, "content": ""}]


def _result(content: Any, place: str) -> str:
    """Text of a tool's result: a text, or blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(one, Mapping) for one in content):
        raise bad_request(f"{place} should be text or a list of blocks", place, "invalid_value")
    return "\n".join(_part_text(one, f"{place}[{at}]") for at, one in enumerate(content))


def _assistant(role: str, blocks: Sequence[MessageBlock], place: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.id or not block.name or not isinstance(block.input, Mapping):
                raise bad_request(f"{place}[{at}] should have id, name and input, an object", f"{place}[{at}]",
                                  "invalid_value")
            calls.append({"id": block.id, "type": "function",
                          "function": {"name": block.name, "arguments": json.dumps(block.input)}})
        elif block.type in THOUGHTS:
            thoughts.append(block.thinking or "")
        else:
            texts.append(_block_text(block, f"{place}[{at}]"))
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | {"tool_calls": calls} if calls else message]


def _block_text(block: MessageBlock, place: str) -> str:
    return _part_text(block.model_dump(exclude_none=True), place)


def _part_text(part: Mapping[str, Any], place: str) -> str:
    """The text of a part of text, of a document that is one, or of a result of a search, below its title and source."""
    kind, source, content = part.get("type"), part.get("source"), part.get("content")
    inner = source if isinstance(source, Mapping) else {}
    text = part.get("text") if kind == "text" else None
    if kind == "document":
        text = inner.get("data") if inner.get("type") == "text" else None
    if kind == "search_result" and isinstance(content, list) and isinstance(source, str):
        texts = [_part_text(one if isinstance(one, Mapping) else {}, f"{place}.content[{at}]")
                 for at, one in enumerate(content)]
        text = "\n".join([f"{part.get('title', '')} ({source})", *texts])
    if not isinstance(text, str):
        raise _unreadable(kind, place)
    return text


def _texts(blocks: Sequence[MessageBlock], place: str) -> list[str]:
    return [_block_text(block, f"{place}[{at}]") for at, block in enumerate(blocks)]


def _unreadable(kind: Any, place: str):
    return bad_request(f"{place} is of type {quoted(kind)}; models here read text only", place, "unsupported")


def tools_of_messages(body: CountRequest, ignored: Ignored) -> dict[str, Any]:
    """Fields of a chat request for tools. Anthropic's own tools are left out, unless one has to be called.

    Raises:
        ApiError: a tool without a name, or a choice that cannot be met.
    """
    functions = []
    for at, tool in enumerate(body.tools or []):
        if (function := _function(tool, f"tools[{at}]", ignored)) is not None:
            functions.append(function)
    choice = body.tool_choice
    if choice is None or (choice.type in ("auto", "none") and not functions):
        return {"tools": functions or None}
    if choice.type == "tool" and not choice.name:
        raise bad_request("tool_choice of type tool needs a name", "tool_choice.name", "missing_field")
    wanted: Any = {"auto": "auto", "none": "none", "any": "required",
                   "tool": {"type": "function", "function": {"name": choice.name}}}[choice.type]
    return {"tools": functions or None, "tool_choice": wanted,
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _function(tool: MessagesTool, place: str, ignored: Ignored) -> dict[str, Any] | None:
    if tool.type not in (None, "custom"):
        ignored.add(place, f"{place} is a tool of type {quoted(tool.type)}, which this service does not have",
                    "unsupported")
        return None
    if tool.name is None:
        raise bad_request(f"{place}.name is missing", f"{place}.name", "missing_field")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema,
                "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class Blocks:
    """Blocks of a reply as they grow. `take` and `end` give the events that tell of them."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None  # type of the last block, which grows

    def take(self, part: ReplyPart) -> Iterator[Event]:
        """One more part."""
        block: dict[str, Any]
        if part.kind == "arguments":
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
            return
        if part.call is not None:
            if part.kind == "called":
                self.blocks[-1]["input"] = json.loads(part.call.call.arguments)
            yield from self.end()
            if part.kind == "call":
                block = {"type": "tool_use", "id": f"toolu_{part.call.id.removeprefix('call_')}",
                         "name": part.call.call.name, "input": {}}
                yield self._begin(block, dict(block))
            return
        kind = "thinking" if part.kind == "reasoning" else "text"
        if self._open != kind:
            yield from self.end()
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield self._begin(block, dict(block))
        self.blocks[-1][kind] += part.text
        yield self._delta({"type": f"{kind}_delta", kind: part.text})

    def end(self) -> Iterator[Event]:
        """No more parts come, or none of the same kind."""
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": len(self.blocks) - 1}

    def _begin(self, block: dict[str, Any], told: dict[str, Any]) -> Event:
        self.blocks.append(block)
        self._open = block["type"]
        return "content_block_start", {"index": len(self.blocks) - 1, "content_block": told}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": delta}
