"""OpenAI's client: Responses."""

import json

import openai
from checks import ASKED, KEY, MODEL, PLACE, QUESTION, TOLD, URL, WEATHER, is_call, is_place, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
MORE = {"model": MODEL, "max_output_tokens": 60}


def conversation():
    first = client.responses.create(input=QUESTION, **MORE)
    assert first.output_text
    assert client.responses.create(input="And goodbye.", previous_response_id=first.id, **MORE).output_text


def stream():
    whole = client.responses.create(input=QUESTION, temperature=0, **MORE).output_text
    with client.responses.stream(input=QUESTION, temperature=0, **MORE) as events:
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(parts) > 2 and "".join(parts) == whole


def tool():
    tools = [{"type": "function", **WEATHER}]
    first = client.responses.create(input=ASKED, tools=tools, tool_choice="required", **MORE)
    call = next(item for item in first.output if item.type == "function_call")
    is_call(call.name, call.arguments)
    done = {"type": "function_call_output", "call_id": call.call_id, "output": TOLD}
    assert client.responses.create(input=[done], previous_response_id=first.id, **MORE).output_text


def structured():
    form = {"format": {"type": "json_schema", "name": "place", "strict": True, "schema": PLACE}}
    is_place(json.loads(client.responses.create(input="Name a city.", text=form, **MORE).output_text))


tell(openai.__version__, conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
