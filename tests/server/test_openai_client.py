"""The official client against a real service: chat, completions, embeddings, models, tools, structured output."""

import json

import numpy as np
import pytest

from tests.waiting import until

openai = pytest.importorskip("openai")

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "Tells the weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"], "additionalProperties": False}}}


def test_chat(openai_client, model):
    reply = openai_client.chat.completions.create(model="org/chat", messages=HI, temperature=0, max_tokens=20)
    expected = model.generate(HI, max_tokens=20, chat=True, temperature=0)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.object == "chat.completion" and reply.model == "org/chat" and reply.created > 1.7e9
    assert reply.usage.completion_tokens == 20 == reply.usage.total_tokens - reply.usage.prompt_tokens
    assert reply.usage.prompt_tokens == expected.stats["prompt_tokens"]
    assert reply.system_fingerprint.startswith("fp_")


def test_reused_tokens_are_counted(openai_client):
    prompt = "A long beginning that comes twice. " * 8
    options = {"model": "org/chat", "max_tokens": 1, "temperature": 0}
    first = openai_client.completions.create(prompt=prompt + "one", **options)
    second = openai_client.completions.create(prompt=prompt + "two", **options)
    assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens_details.cached_tokens <= second.usage.prompt_tokens


def test_streamed_chat_is_the_same(openai_client):
    options = {"model": "org/chat", "messages": HI, "temperature": 0.9, "seed": 5, "max_tokens": 40, "top_p": 0.9}
    whole = openai_client.chat.completions.create(**options)
    chunks = list(openai_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.object for chunk in chunks} == {
        "chat.completion.chunk"}
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert chunks[0].choices[0].delta.role == "assistant"
    *body, last = chunks
    assert last.choices == [] and last.usage.model_dump() == whole.usage.model_dump() | {
        "prompt_tokens_details": last.usage.prompt_tokens_details.model_dump()}
    assert all(chunk.usage is None for chunk in body)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["length"]


def test_several_choices(openai_client):
    options = {"model": "org/chat", "messages": HI, "temperature": 1, "seed": 3, "max_tokens": 12, "n": 3,
               "extra_body": {"ignore_eos": True}}
    whole = openai_client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 36
    streamed = ["", "", ""]
    ends = {}
    for chunk in openai_client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert streamed == texts and ends == {0: "length", 1: "length", 2: "length"}


def test_chat_logprobs(openai_client):
    options = {"model": "org/chat", "messages": HI, "temperature": 0, "max_tokens": 6, "logprobs": True}
    plain = openai_client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(plain) == 6 and all(entry.top_logprobs == [] and entry.logprob < 0 for entry in plain)
    whole = openai_client.chat.completions.create(**options, top_logprobs=3).choices[0]
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert bytes(entry.bytes).decode() == entry.token
    assert "".join(entry.token for entry in whole.logprobs.content) == whole.message.content
    streamed = [entry for chunk in openai_client.chat.completions.create(**options, top_logprobs=3, stream=True)
                if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == whole.logprobs.content


def test_stop_bias_and_penalties_are_honoured(openai_client, model):
    free = openai_client.chat.completions.create(model="org/chat", messages=HI, temperature=0, max_tokens=30)
    text = free.choices[0].message.content
    stopped = openai_client.chat.completions.create(model="org/chat", messages=HI, temperature=0, max_tokens=30,
                                                    stop=[text[8:10], "never"])
    assert stopped.choices[0].message.content == text[:text.index(text[8:10])]
    assert stopped.choices[0].finish_reason == "stop"
    wanted = model.tokenizer.encode("z")[0]
    biased = openai_client.chat.completions.create(model="org/chat", messages=HI, temperature=0, max_tokens=5,
                                                   logit_bias={str(wanted): 100})
    assert biased.choices[0].message.content == "zzzzz"
    varied = openai_client.chat.completions.create(model="org/chat", messages=HI, temperature=0, max_tokens=40,
                                                   frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(varied.choices[0].message.content)) > len(set(text))


def test_completions(openai_client, model):
    reply = openai_client.completions.create(model="org/chat", prompt="Once upon", temperature=0, max_tokens=9)
    assert reply.choices[0].text == model.generate("Once upon", max_tokens=9).text
    assert reply.object == "text_completion" and reply.choices[0].finish_reason == "length"
    ids = [model.tokenizer.encode(text) for text in ("a", "bc")]
    several = openai_client.completions.create(model="org/chat", prompt=ids, temperature=0, max_tokens=3)
    assert [choice.text for choice in several.choices] == [model.generate(one, max_tokens=3).text for one in ids]
    assert several.usage.prompt_tokens == 3 and several.usage.completion_tokens == 6
    drawn = openai_client.completions.create(model="org/chat", prompt=["a", "bc"], temperature=1, max_tokens=3, n=2)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2, 3]
    assert openai_client.completions.create(model="org/chat", prompt="a", temperature=0).usage.completion_tokens == 16


def test_streamed_completions(openai_client):
    options = {"model": "org/chat", "prompt": ["Once", "Twice"], "temperature": 0, "max_tokens": 7, "echo": True,
               "logprobs": 2}
    whole = openai_client.completions.create(**options)
    texts, tokens = ["", ""], [[], []]
    for chunk in openai_client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices] and texts[1].startswith("Twice")
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


def test_best_of(openai_client):
    options = {"model": "org/chat", "prompt": "Once", "temperature": 1, "seed": 2, "max_tokens": 5, "logprobs": 0}
    several = openai_client.completions.create(**options, n=4).choices
    best = openai_client.completions.create(**options, best_of=4).choices
    assert [choice.text for choice in best] == [
        max(several, key=lambda choice: sum(choice.logprobs.token_logprobs)).text]


def test_embeddings(openai_client, model_folders):
    import numflow

    reply = openai_client.embeddings.create(model="encoder", input=["Paris is large.", "Paris"],
                                            extra_body={"pooling": "mean"})
    with numflow.load(model_folders["encoder"], backend="reference") as encoder:
        expected = encoder.embed(["Paris is large.", "Paris"], pooling="mean")
    np.testing.assert_allclose([entry.embedding for entry in reply.data], expected, atol=1e-6)  # base64 by default
    plain = openai_client.embeddings.create(model="encoder", input="Paris", encoding_format="float",
                                            extra_body={"pooling": "mean"})
    np.testing.assert_allclose(plain.data[0].embedding, expected[1], atol=1e-6)
    assert reply.usage.prompt_tokens == 9 and reply.object == "list"


def test_embeddings_of_token_ids(openai_client, model_folders):
    import numflow

    ids = [[2, 5, 8, 3], [2, 5, 3]]
    reply = openai_client.embeddings.create(model="encoder", input=ids, extra_body={"pooling": "mean"})
    one = openai_client.embeddings.create(model="encoder", input=ids[1], extra_body={"pooling": "mean"})
    with numflow.load(model_folders["encoder"], backend="reference") as encoder:
        expected = encoder.embed(ids, pooling="mean")
    np.testing.assert_allclose([entry.embedding for entry in reply.data], expected, atol=1e-6)
    np.testing.assert_allclose(one.data[0].embedding, expected[1], atol=1e-6)
    assert reply.usage.prompt_tokens == 7


def test_models(openai_client):
    assert [entry.id for entry in openai_client.models.list()] == ["org/chat", "encoder", "translator", "limited"]
    one = openai_client.models.retrieve("org/chat")
    assert (one.id, one.object, one.owned_by) == ("org/chat", "model", "numflow")
    assert openai_client.models.retrieve("gpt-3.5-turbo").id == "org/chat"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        openai_client.models.retrieve("other")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_has_to_be_called(openai_client, choice):
    options = {"model": "org/chat", "messages": HI, "tools": [WEATHER], "tool_choice": choice, "temperature": 1,
               "seed": 1, "max_tokens": 200}
    reply = openai_client.chat.completions.create(**options).choices[0]
    call, = reply.message.tool_calls
    assert reply.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3)

    def pieces():
        deltas = [delta for chunk in openai_client.chat.completions.create(**options, stream=True)
                  for delta in chunk.choices[0].delta.tool_calls or []]
        assert deltas[0].index == 0 and deltas[0].id and deltas[0].function.name == "weather"
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
        return len(deltas) > 3

    until(pieces, "arguments in pieces", 1)  # on a busy machine several come as one


def test_a_call_of_the_models_own_will(openai_client):
    said = r'Well\.<tool_call>\{"name": "weather", "arguments": \{"city": "Rome", "days": 1\}\}</tool_call>'
    options = {"model": "org/chat", "messages": HI, "tools": [WEATHER], "temperature": 0, "max_tokens": 200,
               "extra_body": {"regex": said}}
    whole = openai_client.chat.completions.create(**options).choices[0]
    call, = whole.message.tool_calls
    assert whole.message.content == "Well." and whole.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 1}
    chunks = [chunk.choices[0] for chunk in openai_client.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Well."
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "weather") and deltas[0].id
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    none = openai_client.chat.completions.create(**options, tool_choice="none").choices[0]
    assert none.message.tool_calls is None and "<tool_call>" in none.message.content


def test_thinking_is_told_apart(openai_client):
    options = {"model": "org/chat", "messages": HI, "temperature": 0, "max_tokens": 60, "logprobs": True,
               "extra_body": {"regex": "<think>hm\nwell</think>\n\nyes"}}
    whole = openai_client.chat.completions.create(**options).choices[0]
    assert (whole.message.content, whole.message.reasoning_content) == ("yes", "hm\nwell")
    chunks = [chunk.choices[0] for chunk in openai_client.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "yes"
    assert "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks) == "hm\nwell"
    told = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert "".join(told) == "<think>hm\nwell</think>\n\nyes"  # entries of all tokens, also of the marks


def test_marks_of_calls_are_seen_though_they_are_special_tokens(openai_client, model):
    """A tool call that is cut off by the length limit is returned, streamed or not."""
    mark = str(model.tokenizer.id_of("<tool_call>"))
    options = {"model": "org/chat", "messages": HI, "tools": [WEATHER], "temperature": 0, "max_tokens": 2,
               "logit_bias": {mark: 100}}
    whole = openai_client.chat.completions.create(**options).choices[0]
    assert whole.message.content == "<tool_call><tool_call>" and whole.finish_reason == "length"
    streamed = [chunk.choices[0].delta.content or "" for chunk in
                openai_client.chat.completions.create(**options, stream=True)]
    assert "".join(streamed) == "<tool_call><tool_call>"


def test_a_conversation_with_tools_goes_on(openai_client):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    reply = openai_client.chat.completions.create(
        model="org/chat", tools=[WEATHER], max_tokens=4, temperature=0, messages=[
            *HI, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}])
    assert reply.choices[0].message.tool_calls is None and reply.choices[0].finish_reason == "length"


def test_structured_output(openai_client):
    schema = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 5}, "good": {"type": "boolean"}},
              "required": ["word", "good"], "additionalProperties": False}
    reply = openai_client.chat.completions.create(
        model="org/chat", messages=HI, temperature=1, seed=4, max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}})
    found = json.loads(reply.choices[0].message.content)
    assert set(found) == {"word", "good"} and isinstance(found["good"], bool) and len(found["word"]) <= 5
    assert reply.choices[0].finish_reason == "stop"


def test_errors_are_those_that_the_client_knows(openai_client):
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="org/chat", messages=HI, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="gpt-9", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(model="org/chat", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    assert "600 tokens" in str(caught.value) and "512" in str(caught.value)


def test_own_settings_go_by_extra_body(openai_client):
    reply = openai_client.chat.completions.create(model="org/chat", messages=HI, max_tokens=8, temperature=0,
                                                  extra_body={"regex": "(ab)+", "min_tokens": 4})
    assert set(reply.choices[0].message.content) == {"a", "b"}


def test_without_v1(openai_client, server):
    bare = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)
    assert bare.chat.completions.create(model="org/chat", messages=HI, max_tokens=1).usage.completion_tokens == 1
    assert bare.completions.create(model="org/chat", prompt="a", max_tokens=1).usage.completion_tokens == 1
    bare.close()
