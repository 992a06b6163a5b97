"""smolagents: an agent program whose every step is a call."""

import json
from importlib.metadata import version

from checks import KEY, MODEL, PLACE, QUESTION, TOLD, URL, is_place, tell
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool


def served(seed=5):
    return OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=100, temperature=0.7, seed=seed)


model = served()
SEEDS = 8  # so often a step may be the answer's own tool, between which and the weather the model chooses
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
    asked = [said("Count from one to ten, in words.")]
    assert len([part for part in model.generate_stream(asked) if part.content]) > 2


def run():
    for seed in range(SEEDS):
        agent = ToolCallingAgent(tools=[weather], model=served(seed), max_steps=3, verbosity_level=0)
        assert agent.run("The weather in Rome?") is not None
        if calls:
            return "yes"
    raise AssertionError(f"{SEEDS} answers without a call of the weather")


def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    is_place(json.loads(model([said("Name a city.")], response_format=shape).content))


tell(version("smolagents"), conversation=conversation, stream=stream, tool_call_with_result=run,
     structured_answer=structured)
