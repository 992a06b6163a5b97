"""Ollama's client."""

import json
from importlib.metadata import version

import ollama
from checks import ASKED, CALLS, MODEL, PLACE, QUESTION, TOLD, URL, WEATHER, is_call, is_place, tell

client = ollama.Client(host=URL, timeout=300)
MORE = {"model": MODEL, "options": {"num_predict": 120, "temperature": 0}}


def conversation():
    messages = [{"role": "user", "content": QUESTION}]
    first = client.chat(messages=messages, **MORE).message
    assert client.chat(messages=[*messages, first, {"role": "user", "content": "And goodbye."}], **MORE).message.content


def stream():
    messages = [{"role": "user", "content": QUESTION}]
    parts = [part.message.content for part in client.chat(messages=messages, stream=True, **MORE)]
    assert len(parts) > 2 and "".join(parts) == client.chat(messages=messages, **MORE).message.content


def tool():
    tools, messages = [{"type": "function", "function": WEATHER}], [{"role": "user", "content": ASKED}]
    asked = {**MORE, "options": {**MORE["options"], **CALLS}}  # its interface has no word for it
    first = client.chat(messages=messages, tools=tools, **asked).message
    call, = first.tool_calls
    assert not first.content
    is_call(call.function.name, dict(call.function.arguments))
    parts = list(client.chat(messages=messages, tools=tools, stream=True, **asked))
    assert [one.function for part in parts for one in part.message.tool_calls or []] == [call.function]
    messages += [first, {"role": "tool", "tool_name": "weather", "content": TOLD}]
    assert client.chat(messages=messages, **MORE).message.content  # with the tools it might call one again


def structured():
    is_place(json.loads(client.chat(messages=[{"role": "user", "content": "Name a city."}], format=PLACE,
                                    **MORE).message.content))


tell(version("ollama"), conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
