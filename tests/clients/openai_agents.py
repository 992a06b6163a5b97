"""OpenAI's Agents SDK, over Responses."""

import asyncio
from importlib.metadata import version
from typing import Annotated

import pydantic
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import ASKED, KEY, MODEL, QUESTION, SPEAKS, TOLD, URL, is_place, tell
from openai import AsyncOpenAI

set_tracing_disabled(True)
calls = []


class Place(pydantic.BaseModel, extra="forbid"):
    name: Annotated[str, pydantic.Field(max_length=12)]
    large: bool


@function_tool
def weather(city: Annotated[str, pydantic.Field(max_length=12)]) -> str:
    """The weather of a city."""
    calls.append(city)
    return TOLD


def agent(output=None, tools=(), again=False, **settings):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
    return Agent(name="a", instructions="Be brief.", model=OpenAIResponsesModel(MODEL, client), output_type=output,
                 tools=list(tools), reset_tool_choice=not again,
                 model_settings=ModelSettings(max_tokens=80, temperature=0, **settings))


def conversation():
    first = Runner.run_sync(agent(extra_body=SPEAKS), QUESTION)
    more = [*first.to_input_list(), {"role": "user", "content": "And goodbye."}]
    assert first.final_output and Runner.run_sync(agent(extra_body=SPEAKS), more).final_output


def stream():
    async def parts():
        found = Runner.run_streamed(agent(extra_body=SPEAKS), QUESTION)
        return [event.data.delta async for event in found.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]

    assert len(asyncio.run(parts())) > 2


def tool():
    again = MODEL == "toy"  # which would not end an answer
    try:
        Runner.run_sync(agent(tools=[weather], again=again, tool_choice="required"), ASKED, max_turns=4)
    except MaxTurnsExceeded:  # it goes on calling: every result has gone back
        assert len(calls) > 1
        return f"yes, {len(calls)} times"
    assert calls and not again
    return "yes"


def structured():
    is_place(Runner.run_sync(agent(Place), "Name a city.").final_output.model_dump())


tell(version("openai-agents"), conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
