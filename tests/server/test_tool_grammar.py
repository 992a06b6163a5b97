"""Optional tool calls: free text is allowed; a text that begins as a call must end as a call that fits its schema."""

import json

import numpy as np
import pytest

from numflow.decoding.structured import Grammars
from numflow.server.http.errors import ApiError
from numflow.server.http.ignored import Ignored
from numflow.server.messages import schemas
from numflow.server.messages.reply import Splitter, special_marks
from numflow.server.messages.tool_formats import FORMATS, GENERIC
from numflow.server.messages.tool_grammar import calls_or_text, marked_calls
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import prepare
from numflow.server.protocols.tools import call_schema
from tests.server.test_tools import HI, PLAIN, prompt_of, served  # noqa: F401

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"$ref": "#/$defs/Day"}},
           "required": ["city"], "additionalProperties": False, "$defs": {"Day": {"enum": ["Mon", "Tue"]}}}
FUNCTIONS = [{"name": "weather", "parameters": WEATHER}, {"name": "a.b-c"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CALL = '{"name": "weather", "arguments": {"city":"Rome","day":"Mon"}}'


@pytest.fixture(scope="module")
def takes(model):
    """takes(grammar, text) -> whether the grammar accepts the text and may end there."""
    grammars = Grammars(model.tokenizer, model.vocabulary)

    def ask(grammar: str, text: str) -> bool:
        matcher = grammars.compile("grammar", grammar, model.tokenizer.eos_ids)
        for id in model.tokenizer.encode(text, add_special=False):
            if not np.isfinite(matcher.apply(np.zeros(model.vocabulary, np.float32))[id]):
                return False
            matcher.accept(id)
        ends = matcher.apply(np.zeros(model.vocabulary, np.float32))[list(model.tokenizer.eos_ids)]
        return bool(np.isfinite(ends).any())

    return ask


@pytest.fixture(scope="module")
def accepts(takes):
    """accepts(text, several) -> whether the grammar for texts that are only calls accepts it."""
    return lambda text, several=True: takes(calls_or_text(FUNCTIONS, several), text)


@pytest.mark.parametrize("text", [
    "", "Hello", "é🙂\n", '{"a": 1}', "[1, 2]", '{"name": "bob"}', '{"name": "weathers"}', 'So: {"name": "weather"}',
    "{", CALL, CALL.replace(" ", ""), f"\n\n{CALL}", CALL.replace("arguments", "parameters"), f"{CALL}\n{CALL}",
    '{"name": "a.b-c", "arguments": {"any":[1]}}', f"[{CALL}]", f"[{CALL}, {CALL}]",
    '{"type": "function", "name": "weather", "parameters": {"city":"Rome"}}'])
def test_texts_and_calls(accepts, text):
    assert accepts(text)


@pytest.mark.parametrize("text", [
    CALL[:-1], '{"name": "weather"}', CALL.replace("city", "town"), CALL.replace("Mon", "Sun"), f"{CALL} more",
    f"[{CALL}", '{"name": "weather", "arguments": {}}', '{"name": "a.b-c", "arguments": []}'])
def test_what_begins_as_a_call_is_one(accepts, text):
    assert not accepts(text)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.head and form.begin])
def test_calls_between_marks_fit_their_schemas(takes, model, name, several):
    form, think = FORMATS[name], ("<think>", "</think>")
    special = {text: id for id, text in special_marks(model.tokenizer, (*think, *form.marks)).items()}
    grammar = marked_calls(form, FUNCTIONS, several, special)

    def call(function, **arguments):
        return form.text(function, arguments).replace(": ", ":")

    good, other = call("weather", city="R"), call("a.b-c", n=[1])
    for text in ("", "Hello", "1 < 2 [x] {}", good, f"Well.\n{good}", f"<think>hm</think>\n{other}", f"<{other}"):
        assert takes(grammar, text), text
    for text in (form.begin, call("weather", town="R"), call("weather", city=1), call("c"), good[:-len(form.end) - 1]):
        assert not takes(grammar, text), text
    if form.end:
        assert takes(grammar, f"{good} ok")
        assert takes(grammar, f"{good}\nand {other}!") is takes(grammar, good + other) is several
    elif not form.wrapped:
        assert takes(grammar, good + other) is several and not takes(grammar, f"{good} ok")
    else:
        two = f"{form.begin}[{good.removeprefix(form.begin)}, {other.removeprefix(form.begin)}]"
        assert takes(grammar, two) is several and not takes(grammar, f"{good} ok")


def test_strict_functions_are_met_or_told(served):  # noqa: F811
    strict = [{"type": "function", "function": {**FUNCTIONS[0], "strict": True}}]
    ignored = Ignored()
    body = schemas.ChatRequest.model_validate_json(json.dumps({"messages": HI, "tools": strict}))
    one = served()
    grammar = prepare(one, body, True, ignored).wished["grammar"]
    assert "city" in grammar and not ignored.why
    for seed in range(4):
        begun = grammar.replace("start: free (", "start: (", 1)  # no text before a call
        found = one.model.generate("x", max_tokens=100, temperature=1, seed=seed, grammar=begun)
        splitter = Splitter(one.tool_format)
        splitter.feed("".join(one.marks.get(id, one.tokenizer.decode([id])) for id in found.ids), end=True)
        assert all("city" in json.loads(call.call.arguments) for call in splitter.reply.calls)
    assert not prepare(served(PLAIN, tool_format="pythonic"), body, True, ignored).wished
    assert "strict has no effect" in ignored.why["tools[0].function.strict"]
    with pytest.raises(ApiError, match="strict has no effect"):
        prepare(served(PLAIN, tool_format="pythonic"), body, True, Ignored(strict=True))


def test_one_call_where_one_is_wanted(accepts):
    assert accepts(CALL, several=False) and accepts(f"[{CALL}]", several=False)
    assert not accepts(f"{CALL}{CALL}", several=False) and not accepts(f"[{CALL},{CALL}]", several=False)


def test_a_call_of_a_models_own_will_fits_its_schema(served):  # noqa: F811
    one = served(PLAIN)
    _, prompt = prompt_of(one, tools=TOOLS)
    assert prompt.wished and not prompt.settings
    grammar = prompt.wished["grammar"].replace("start: TEXT |", "start:")
    for seed in range(4):
        found = one.model.generate(prompt.ids[-100:], max_tokens=100, temperature=1, seed=seed, grammar=grammar)
        splitter = prompt.make_splitter()
        splitter.feed(found.text, end=True)
        for call in splitter.reply.calls:
            arguments = json.loads(call.call.arguments)
            assert call.call.name == "a.b-c" or ("city" in arguments and arguments.keys() <= {"city", "day"})
            assert arguments.get("day", "Mon") in ("Mon", "Tue") or call.call.name == "a.b-c"
        assert splitter.reply.calls or found.finish_reason == "length"


def test_where_there_is_no_such_grammar(served):  # noqa: F811
    assert not prompt_of(served(), tools=TOOLS)[1].wished  # the template lists the tools in an unknown format
    assert not prompt_of(served(PLAIN, tool_format="hermes"), tools=TOOLS)[1].wished
    assert not prompt_of(served(PLAIN), tools=TOOLS, tool_choice="required")[1].wished
    assert not prompt_of(served(PLAIN), tools=TOOLS, tool_choice="none")[1].wished
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]
    assert not prompt_of(served(PLAIN), tools=odd)[1].wished
    odd[0]["function"]["strict"] = True
    with pytest.raises(ApiError, match="tools: .*nonsense"):
        prompt_of(served(PLAIN), tools=odd)


@pytest.mark.parametrize("count", [1, 2])
def test_references_of_schemas_are_found_in_forced_calls(model, count):
    tools = [schemas.Tool.model_validate(tool) for tool in [*TOOLS[:1], *TOOLS[:1]][:count]]
    found = model.generate("x", max_tokens=200, temperature=1, seed=1, json_schema=call_schema(tools))
    assert found.finish_reason == "length" or "city" in json.loads(found.text)["arguments"]


@pytest.mark.parametrize("form, text", [
    ("tag_json", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"), ("plain_json", f"[{CALL}, {CALL}]"),
    ("plain_json", f"{CALL}\n{CALL}")])
def test_one_call_without_parallel_ones(form, text):
    for single, count in ((True, 1), (False, 2)):
        splitter = Splitter(FORMATS[form], frozenset({"weather"}), single=single)
        splitter.feed(text, end=True)
        assert len(splitter.reply.calls) == count and splitter.reply.content == ""


def test_requests_say_so(served):  # noqa: F811
    body = schemas.ChatRequest(messages=HI, tools=TOOLS, parallel_tool_calls=False)
    one: Served = served(PLAIN)
    assert one.tool_format is GENERIC
    prompt = prepare(one, body, True, Ignored())
    assert prompt.splitter["single"] and "call+" not in prompt.wished["grammar"]
