"""Files of a conversation: saved conversations, and text files that are attached to a question."""

import json
import stat
from pathlib import Path
from typing import Any

from numflow.cli.inputs import read_text
from numflow.errors import RequestError

ROLES = ("system", "user", "assistant")
LARGEST = 1_000_000  # bytes of an attached file


def write_conversation(path: Path, messages: list[dict[str, str]]) -> None:
    """Write messages to a file. An existing file is overwritten only if it is a conversation.

    Raises:
        RequestError: the file cannot be written, or is no conversation.
    """
    from numflow.formats.writer import found

    if found(path):
        read_conversation(path)
    try:
        path.write_text(json.dumps({"messages": messages}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def read_conversation(path: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """Read the system message and the turns of a file.

    Raises:
        RequestError: the file is not one of `write_conversation`.
    """
    try:
        return turns_of(json.loads(read_text(path)), path)
    except ValueError as error:
        raise RequestError(f"{path}: not JSON ({error})") from None


def turns_of(found: Any, path: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """System message and turns of a file's parsed JSON.

    Raises:
        RequestError: the JSON is no conversation.
    """
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(
            isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str)
            for one in messages):
        raise RequestError(f"{path}: no conversation: expected \"messages\", each with a role "
                           f"({', '.join(ROLES)}) and a content")
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    if [one["role"] for one in messages] != ["user", "assistant"] * (len(messages) // 2):
        raise RequestError(f"{path}: after an optional system message, user and assistant messages should alternate")
    texts = [one["content"] for one in messages]
    return system, list(zip(texts[::2], texts[1::2]))


def attachment(path: Path) -> str:
    """The name and the text of a file, as a Markdown code block whose fence does not occur in the text.

    Raises:
        RequestError: the path is no regular file, or the file is too large or not UTF-8.
    """
    from numflow.formats.writer import found

    there = found(path)
    if there and not stat.S_ISREG(there.st_mode):
        raise RequestError(f"{path}: not a file")
    if there and there.st_size > LARGEST:
        raise RequestError(f"{path}: {there.st_size} bytes; an attached file may have {LARGEST} at most")
    text, fence = read_text(path).removesuffix("\n"), "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text}\n{fence}"
