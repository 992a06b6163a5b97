"""LiteLLM."""

import json
from importlib.metadata import version

import litellm
from checks import ASKED, KEY, MODEL, PLACE, QUESTION, TOLD, URL, WEATHER, is_call, is_place, tell

MORE = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 60, "temperature": 0,
        "num_retries": 0, "timeout": 300}


def ask(messages, **more):
    return litellm.completion(messages=messages, **MORE, **more)


def conversation():
    messages = [{"role": "user", "content": QUESTION}]
    first = ask(messages).choices[0].message
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And goodbye."}]
    assert ask(messages).choices[0].message.content


def stream():
    messages = [{"role": "user", "content": QUESTION}]
    parts = [part.choices[0].delta.content or "" for part in ask(messages, stream=True)]
    assert len(parts) > 2 and "".join(parts) == ask(messages).choices[0].message.content


def tool():
    tools, messages = [{"type": "function", "function": WEATHER}], [{"role": "user", "content": ASKED}]
    message = ask(messages, tools=tools, tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    is_call(call.function.name, call.function.arguments)
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    assert ask(messages).choices[0].message.content


def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    is_place(json.loads(ask([{"role": "user", "content": "Name a city."}], response_format=shape)
                        .choices[0].message.content))


tell(version("litellm"), conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
