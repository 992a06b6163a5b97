"""smolagents: an agent program whose every step is a call."""

import json
from importlib.metadata import version

from checks import KEY, MODEL, PLACE, QUESTION, TOLD, URL, is_place, tell
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=100, temperature=0.7, seed=5)
calls = []


def said(text):
    return ChatMessage(role="user", content=[{"type": "text", "text": text}])


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    calls.append(city)
    return TOLD


def conversation():
    assert model([said(QUESTION)]).content


def stream():
    assert len([part for part in model.generate_stream([said(QUESTION)]) if part.content]) > 2


def run():
    found = ToolCallingAgent(tools=[weather], model=model, max_steps=4, verbosity_level=0).run("The weather in Rome?")
    assert found is not None
    return "yes" if calls else "yes, by the answer's tool"


def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    is_place(json.loads(model([said("Name a city.")], response_format=shape).content))


tell(version("smolagents"), conversation=conversation, stream=stream, tool_call_with_result=run,
     structured_answer=structured)
