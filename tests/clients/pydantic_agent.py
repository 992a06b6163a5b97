"""Pydantic AI."""

from importlib.metadata import version
from typing import Annotated

import pydantic
from checks import ASKED, CALLS, KEY, MODEL, QUESTION, TOLD, URL, is_place, tell
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
MORE = {"max_tokens": 120, "temperature": 0, "timeout": 300}


class Place(pydantic.BaseModel, extra="forbid"):
    name: Annotated[str, pydantic.Field(max_length=12)]
    large: bool


def conversation():
    agent = Agent(model, model_settings=MORE)
    first = agent.run_sync(QUESTION)
    assert first.output and agent.run_sync("And goodbye.", message_history=first.all_messages()).output


def stream():
    found = Agent(model, model_settings=MORE).run_stream_sync(QUESTION)
    parts = list(found.stream_text(delta=True, debounce_by=None))
    assert len(parts) > 2


def tool():
    """Calls of a tool, as every answer is held to be one, until they are enough; then an answer that is a call."""
    calls = []
    agent = Agent(model, model_settings={**MORE, "extra_body": CALLS})

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        return TOLD

    try:
        agent.run_sync(ASKED, usage_limits=UsageLimits(request_limit=3))
    except UsageLimitExceeded:  # every result has gone back
        assert len(calls) > 1
    found = Agent(model, output_type=ToolOutput(Place), model_settings={**MORE, "seed": 3}).run_sync("Name a city.")
    assert calls and isinstance(found.output, Place)


def structured():
    found = Agent(model, output_type=NativeOutput(Place), model_settings=MORE).run_sync("Name a city.").output
    is_place(found.model_dump())


tell(version("pydantic-ai-slim"), conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
