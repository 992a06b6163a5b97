"""Conversion of Anthropic's Messages: blocks to messages, tools to functions, parts of a reply to blocks and events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numflow.errors import quoted
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.messages_schemas import CountRequest, MessageBlock, MessagesTool, MessageTurn
from numflow.server.messages.reply import ReplyPart

Event = tuple[str, dict[str, Any]]  # type, and fields without the type
THOUGHTS = ("thinking", "redacted_thinking")


def messages_of_turns(turns: Sequence[MessageTurn],
                      system: str | list[MessageBlock] | None) -> tuple[list[dict[str, Any]], str]:
    """Messages of a chat request, and the beginning of the answer: the text of a last turn of the assistant.

    Raises:
        ApiError: a block is incomplete, or has an unsupported type.
    """
    text = system if isinstance(system, str) else "\n\n".join(_texts(system or [], "system"))
    found: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for index, turn in enumerate(turns):
        content = [MessageBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        read = _assistant if turn.role == "assistant" else _user
        found += read(turn.role, content, f"messages[{index}].content")
    begun = ""
    if turns[-1].role == "assistant" and not found[-1].get("tool_calls"):
        begun = found.pop()["content"] or ""
    if not found:
        raise bad_request("messages has no message of the user", "messages", "missing_field")
    return found, begun


def _user(role: str, blocks: Sequence[MessageBlock], place: str) -> list[dict[str, Any]]:
    """Messages of a user turn: each tool result is a separate message, between the texts around it."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_block_text(block, f"{place}[{index}]"))
            continue
        flush()
        if block.tool_use_id is None:
            field = f"{place}[{index}].tool_use_id"
            raise bad_request(f"{field} is missing", field, "missing_field")
        text = _result(block.content, f"{place}[{index}].content")
        found.append({"role": "tool", "tool_call_id": block.tool_use_id,
                      "content": f"Error: {text}" if block.is_error else text})
    flush()
    return found or [{"role": role, "content": ""}]


def _result(content: Any, place: str) -> str:
    """Text of a tool's result, which is a text or a list of blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(one, Mapping) for one in content):
        raise bad_request(f"{place} should be text or a list of blocks", place, "invalid_value")
    return "\n".join(_part_text(one, f"{place}[{index}]") for index, one in enumerate(content))


def _assistant(role: str, blocks: Sequence[MessageBlock], place: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.id or not block.name or not isinstance(block.input, Mapping):
                raise bad_request(f"{place}[{index}] should have id, name and input, an object", f"{place}[{index}]",
                                  "invalid_value")
            calls.append({"id": block.id, "type": "function",
                          "function": {"name": block.name, "arguments": json.dumps(block.input)}})
        elif block.type in THOUGHTS:
            thoughts.append(block.thinking or "")
        else:
            texts.append(_block_text(block, f"{place}[{index}]"))
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | {"tool_calls": calls} if calls else message]


def _block_text(block: MessageBlock, place: str) -> str:
    return _part_text(block.model_dump(exclude_none=True), place)


def _part_text(part: Mapping[str, Any], place: str) -> str:
    """The text of a text block, of a plain-text document, or of a search result (with title and source above it)."""
    kind, source, content = part.get("type"), part.get("source"), part.get("content")
    inner = source if isinstance(source, Mapping) else {}
    text = part.get("text") if kind == "text" else None
    if kind == "document":
        text = inner.get("data") if inner.get("type") == "text" else None
    if kind == "search_result" and isinstance(content, list) and isinstance(source, str):
        texts = [_part_text(one if isinstance(one, Mapping) else {}, f"{place}.content[{index}]")
                 for index, one in enumerate(content)]
        text = "\n".join([f"{part.get('title', '')} ({source})", *texts])
    if not isinstance(text, str):
        raise _unreadable(kind, place)
    return text


def _texts(blocks: Sequence[MessageBlock], place: str) -> list[str]:
    return [_block_text(block, f"{place}[{index}]") for index, block in enumerate(blocks)]


def _unreadable(kind: Any, place: str):
    return bad_request(f"{place} is of type {quoted(kind)}; models here read text only", place, "unsupported")


def tools_of_messages(body: CountRequest, ignored: Ignored) -> dict[str, Any]:
    """Fields of a chat request for tools. Anthropic's own tools are ignored, unless the choice forces one.

    Raises:
        ApiError: a tool has no name, or the choice cannot be met.
    """
    functions = []
    for index, tool in enumerate(body.tools or []):
        if (function := _function(tool, f"tools[{index}]", ignored)) is not None:
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
    """Content blocks of a reply while it is generated. `take` and `end` yield the events of the stream."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None  # type of the last block, if it may still grow

    def take(self, part: ReplyPart) -> Iterator[Event]:
        """Take a part of the reply."""
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
        """End the last block."""
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": len(self.blocks) - 1}

    def _begin(self, block: dict[str, Any], content_block: dict[str, Any]) -> Event:
        self.blocks.append(block)
        self._open = block["type"]
        return "content_block_start", {"index": len(self.blocks) - 1, "content_block": content_block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": delta}
