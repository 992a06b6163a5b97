"""smolagents: an agent program whose every step is a call."""

import json
from importlib.metadata import version

from checks import KEY, MODEL, PLACE, QUESTION, TOLD, URL, is_place, tell
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool


class Held(OpenAIServerModel):
    """A model that asks for the weather before it calls the answer's own tool, between which it would choose."""

    def _prepare_completion_kwargs(self, *given, **named):
        made = super()._prepare_completion_kwargs(*given, **named)
        if made.get("tools"):
            made["tool_choice"] = {"type": "function", "function": {"name": "final_answer" if calls else "weather"}}
        return made


MORE = {"api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 100, "temperature": 0.7, "seed": 5}
model = OpenAIServerModel(MODEL, **MORE)
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


weather.inputs["city"]["maxLength"] = 12  # the toy ends no text by itself


def conversation():
    assert model([said(QUESTION)]).content


def stream():
    asked = [said("Count from one to ten, in words.")]
    assert len([part for part in model.generate_stream(asked) if part.content]) > 2


def run():
    agent = ToolCallingAgent(tools=[weather], model=Held(MODEL, **MORE), max_steps=6, verbosity_level=0)
    assert agent.run("The weather in Rome?") is not None and calls
    return "yes" if len(calls) == 1 else f"yes, {len(calls)} times"


def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    is_place(json.loads(model([said("Name a city.")], response_format=shape).content))


tell(version("smolagents"), conversation=conversation, stream=stream, tool_call_with_result=run,
     structured_answer=structured)
