"""Tools that take a text, and `functions`, with OpenAI's own client: forced, of the model's own will, streamed, and the
conversation that goes on."""

import json
import re

import pytest

from numflow.server.http.errors import ApiError
from numflow.server.messages.custom_tools import custom_input
from tests.server.test_openai_client import HI, WEATHER
from tests.server.test_tool_grammar import takes  # noqa: F401
from tests.server.test_tools import PLAIN, prompt_of, served  # noqa: F401

openai = pytest.importorskip("openai")

SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
SHORT = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NAMED = {"type": "custom", "custom": {"name": "shell"}}
CALL = r'<tool_call>\{"name": "shell", "arguments": \{"input": "ls \\"a\\""\}\}</tool_call>'
LARK = 'start: verb " " file\nverb: "cat" | "rm"\nfile: /[a-c]{1,3}/\n'


def with_grammar(syntax, definition):
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**SHELL["custom"], "format": form}}


@pytest.fixture(scope="module")
def ask(openai_client):
    def made(**fields):
        return openai_client.chat.completions.create(**{
            "model": "org/chat", "messages": HI, "temperature": 1, "max_tokens": 200, "seed": 1, **fields})
    return made


def streamed(ask, **fields):
    """The tool calls, the function_call and the finish_reason of a stream."""
    calls, old, reason = {}, {}, None
    for chunk in ask(stream=True, **fields):
        choice, = chunk.choices
        for delta in choice.delta.tool_calls or []:
            told = delta.model_dump(exclude_none=True)
            inner = (told.get("custom") or {}) | (told.get("function") or {})
            call = calls.setdefault(told["index"], {"id": told.get("id"), "type": told.get("type"), "text": ""})
            call["name"] = call.get("name") or inner["name"]
            call["text"] += inner.get("input", "") + inner.get("arguments", "")
        if choice.delta.function_call is not None:
            old["name"] = old.get("name") or choice.delta.function_call.name
            old["text"] = old.get("text", "") + choice.delta.function_call.arguments
        reason = choice.finish_reason or reason
    return list(calls.values()), old, reason


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "allowed_tools": {
    "mode": "required", "tools": [NAMED]}}])
@pytest.mark.parametrize(("tool", "pattern"), [
    (with_grammar("regex", r"(cat|rm) [a-c]{1,3}"), r"(cat|rm) [a-c]{1,3}"), (with_grammar("lark", LARK),
                                                                              r"(cat|rm) [a-c]{1,3}")])
@pytest.mark.thin(3)
def test_a_custom_tool_has_to_be_called_with_text_of_its_grammar(ask, choice, tool, pattern):
    call, = ask(tools=[tool], tool_choice=choice).choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "shell") and re.fullmatch(pattern, call.custom.input), call
    (told,), _, reason = streamed(ask, tools=[tool], tool_choice=choice)
    assert (told["type"], told["name"], told["text"], reason) == ("custom", "shell", call.custom.input, "tool_calls")


def test_a_call_of_the_models_own_will_beside_a_function(ask):
    fields = {"tools": [SHELL, SHORT], "extra_body": {"regex": f"Well\\.{CALL}"}}
    choice = ask(**fields).choices[0]
    call, = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "shell", 'ls "a"')
    (told,), _, reason = streamed(ask, **fields)
    assert (told["type"], told["text"], reason) == ("custom", 'ls "a"', "tool_calls")
    weather = CALL.replace("shell", "weather").replace(r'"input": "ls \\"a\\""', '"city": "Rome", "days": 1')
    (told,), _, _ = streamed(ask, tools=[SHELL, SHORT], extra_body={"regex": weather})
    assert (told["type"], json.loads(told["text"])) == ("function", {"city": "Rome", "days": 1})


def test_a_call_and_its_result_are_part_of_the_conversation(http):
    def count(name, call):
        return http.post("/tokenize", json={"tools": [SHELL], "messages": [
            *HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **call}]},
            {"role": "tool", "tool_call_id": "c", "content": "b"}]}).json()["count"]

    assert count("custom", {"type": "custom", "custom": {"name": "shell", "input": 'ls "a"'}}) == count("function", {
        "type": "function", "function": {"name": "shell", "arguments": json.dumps({"input": 'ls "a"'})}})


def test_text_of_an_expression_is_held_to_it_at_every_call(served, takes):  # noqa: F811
    tool = with_grammar("regex", "[ab]{3}")
    for one in (served(), served(PLAIN), served(PLAIN, tool_format="hermes"), served(PLAIN, tool_format="mistral")):
        _, prompt = prompt_of(one, tools=[tool])
        begin, end = one.tool_format.begin, one.tool_format.end
        wished = prompt.wished["grammar"]
        for text, fits in (("aba", True), ("abc", False)):
            call = f'{{"name": "shell", "arguments": {{"input":"{text}"}}}}'
            assert takes(wished, f"{begin}{call}{end}") is fits
        assert takes(wished, "Hello.") and takes(wished, "")


def test_what_cannot_be_held_to_a_grammar_is_refused(served, http):  # noqa: F811
    expression, lark = with_grammar("regex", "[ab]{3}"), with_grammar("lark", LARK)
    with pytest.raises(ApiError, match="regular expression of the custom tool shell cannot be enforced: .*tool_choice"):
        prompt_of(served(PLAIN, tool_format="pythonic"), tools=[expression])
    with pytest.raises(ApiError, match="has a Lark grammar, which works only if tool_choice names"):
        prompt_of(served(PLAIN), tools=[lark])
    assert prompt_of(served(PLAIN), tools=[lark], tool_choice="none")
    for tool, more in ((with_grammar("regex", "("), {"tool_choice": "required"}), (with_grammar("regex", "("), {}),
                       (with_grammar("lark", "start: ("), {"tool_choice": NAMED}), (with_grammar("ebnf", "x"), {}),
                       ({**SHELL, "custom": {"name": "shell", "format": {"type": "grammar"}}}, {}),
                       ({"type": "custom", "custom": {"name": "a b"}}, {}), ({"type": "custom"}, {}),
                       (SHELL, {"tool_choice": {"type": "custom", "custom": {"name": "other"}}})):
        reply = http.post("/v1/chat/completions", json={"messages": HI, "tools": [tool], "max_tokens": 9, **more})
        assert reply.status_code == 400, (tool, more)
    two = http.post("/v1/chat/completions", json={"messages": HI, "tools": [SHELL, SHELL]})
    assert two.status_code == 400 and "two tools have the name" in two.json()["error"]["message"]


def test_responses_take_grammars_too(openai_client, http):
    def tool(syntax, definition):
        return {"type": "custom", "name": "shell", "format": {"type": "grammar", "syntax": syntax,
                                                              "definition": definition}}

    for one in (tool("regex", "(cat|rm) [a-c]{1,3}"), tool("lark", LARK)):
        found = openai_client.responses.create(model="org/chat", input="hi", tools=[one], max_output_tokens=200,
                                               temperature=1, tool_choice={"type": "custom", "name": "shell"})
        call, = found.output
        assert call.type == "custom_tool_call" and re.fullmatch("(cat|rm) [a-c]{1,3}", call.input), call
    told = http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, "tools": [tool("lark", LARK)]})
    assert told.status_code == 200 and told.headers["x-numflow-ignored"] == "tools[0]"
    for wrong in (tool("abnf", "x"), {**tool("lark", "x"), "format": {"type": "grammar"}}):
        assert http.post("/v1/responses", json={"input": "hi", "tools": [wrong]}).status_code == 400


def test_the_text_of_a_call():
    assert custom_input('{"input": "a"}') == "a" and custom_input("{}") == ""
    assert custom_input('{"command": "ls"}') == '{"command": "ls"}'


OLD = {"functions": [WEATHER["function"]]}


@pytest.mark.parametrize("asked", [{"function_call": {"name": "weather"}}, {"extra_body": {
    "regex": r'<tool_call>\{"name": "weather", "arguments": \{"city": "Rome", "days": [12]\}\}</tool_call>'}}])
def test_functions_are_called_as_they_were_before_tools(ask, asked):
    choice = ask(**OLD, **asked).choices[0]
    call = choice.message.function_call
    assert (call.name, choice.finish_reason, choice.message.tool_calls) == ("weather", "function_call", None)
    assert set(json.loads(call.arguments)) == {"city", "days"}
    calls, old, reason = streamed(ask, **OLD, **asked)
    assert (calls, old, reason) == ([], {"name": "weather", "text": call.arguments}, "function_call")


def test_functions_that_are_not_to_be_called(ask):
    said = {"extra_body": {"regex": r'<tool_call>\{"name": "weather", "arguments": \{\}\}</tool_call>'}}
    for asked in (OLD | {"function_call": "none"}, {"functions": [], "function_call": "auto"}):
        choice = ask(**asked, **said).choices[0]
        assert choice.message.function_call is None and choice.finish_reason == "stop"
        assert choice.message.content.startswith("<tool_call>")


def test_a_conversation_with_functions_is_one_with_tools(http):
    arguments = '{"city": "Rome", "days": 1}'
    call = {"name": "weather", "arguments": arguments}
    counts = [http.post("/tokenize", json={"messages": [*HI, *messages]}).json()["count"] for messages in (
        [{"role": "assistant", "content": None, "function_call": call},
         {"role": "function", "name": "weather", "content": "sunny"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]},
         {"role": "tool", "tool_call_id": "c", "content": "sunny"}])]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("fields", "param"), [
    ({"function_call": {"name": "f"}}, "function_call"), (OLD | {"tools": [WEATHER]}, "functions"),
    (OLD | {"function_call": {"name": "f"}}, "function_call"), (OLD | {"function_call": "required"}, "function_call"),
    (OLD | {"tool_choice": "required"}, "functions"), ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    (OLD | {"function_call": {"name": "weather"}, "regex": "a"}, "tool_choice")])
def test_mistakes_with_functions_are_told(http, fields, param):
    reply = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 9, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
