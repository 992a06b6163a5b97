"""The program llm, by its Python interface."""

import json
from importlib.metadata import version

from checks import ASKED, CALLS, KEY, MODEL, PLACE, QUESTION, TOLD, URL, is_place, tell
from llm.default_plugins.openai_models import Chat


class Held(Chat):
    """A model that calls a tool before anything else, and none when it has the result: llm has no option for that."""

    def build_kwargs(self, prompt, stream):
        made = super().build_kwargs(prompt, stream)
        if prompt.tools:
            made["extra_body"] = {"tool_choice": "none"} if prompt.tool_results else CALLS
        return made


model = Held("served", model_name=MODEL, api_base=f"{URL}/v1", supports_schema=True, supports_tools=True)
model.key = KEY
MORE = {"max_tokens": 120, "temperature": 0}


def conversation():
    talk = model.conversation()
    for question in (QUESTION, "And goodbye."):
        assert talk.prompt(question, stream=False, **MORE).text()


def stream():
    parts = list(model.prompt(QUESTION, stream=True, **MORE))
    assert len(parts) > 2 and "".join(parts) == model.prompt(QUESTION, stream=False, **MORE).text()


def tool():
    calls = []

    def weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        return TOLD

    found = model.conversation(tools=[weather], chain_limit=3).chain(ASKED, options=MORE)
    assert found.text() and len(calls) == 1


def structured():
    is_place(json.loads(model.prompt("Name a city.", schema=PLACE, stream=False, **MORE).text()))


tell(version("llm"), conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
