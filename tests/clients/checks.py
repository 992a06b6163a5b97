"""The checks that every client program does, and how their outcomes are told: one JSON object on standard output."""

import json
import os
import sys
import traceback
from collections.abc import Callable

URL, MODEL, KEY = os.environ.get("CLIENT_URL", ""), os.environ.get("CLIENT_MODEL", ""), "sk-any"
QUESTION = "Say hello in one short sentence."
ASKED = "What is the weather in Rome? Use the function."
TOLD = "It is sunny, 21 degrees."
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False}}
PLACE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
         "required": ["name", "large"], "additionalProperties": False}
# Settings of numflow's own. The toy ends no answer by itself: SPEAKS holds it to a few words. CALLS is for programs
# that cannot say that a tool has to be called: the answer is a call, as the model writes calls.
_CALL = r'\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2,8}"\}\}'
SPEAKS = {"regex": "[a-z]{3,9}( [a-z]{3,9}){3}"} if MODEL == "toy" else {}
CALLS = {"regex": f"<tool_call>{_CALL}</tool_call>" if MODEL == "toy" else _CALL}
KINDS = ("conversation", "stream", "tool call with result", "structured answer")


def is_place(found: object) -> None:
    """Check an answer against PLACE."""
    assert isinstance(found, dict) and set(found) == {"name", "large"}, found
    assert isinstance(found["name"], str) and isinstance(found["large"], bool), found


def is_call(name: str, arguments: object) -> None:
    """Check a call of WEATHER."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "weather" and isinstance(arguments, dict) and isinstance(arguments["city"], str), (name, arguments)


def tell(version: str, **checks: Callable[[], object]) -> None:
    """Run checks, named as KINDS with "_" for spaces, and print what became of them."""
    found = {}
    for kind in KINDS:
        try:
            check = checks[kind.replace(" ", "_")]
            found[kind] = str(check() or "yes")
        except Exception as error:
            traceback.print_exc()
            found[kind] = f"no: {type(error).__name__}: {error}"[:300]
    json.dump({"version": version, "found": found}, sys.stdout)
