"""Tools on any model: forced calls, templates without tools, formats by name."""

import json

import pytest

from numflow.errors import TokenizerError
from numflow.server.config.config import make_config
from numflow.server.http.errors import ApiError
from numflow.server.http.ignored import Ignored
from numflow.server.messages import schemas
from numflow.server.messages.reply import Splitter
from numflow.server.messages.tool_formats import ALIASES, FORMATS, GENERIC, find_format
from numflow.server.models.served import Served
from numflow.server.protocols import tools
from numflow.server.protocols.conversation import prepare

PLAIN = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
DEAF = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
UNKNOWN = "{% if tools %}%%{{ tools }}%%{% endif %}" + PLAIN
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
    "additionalProperties": False}}}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served(model_folders, tmp_path):
    """served(template, **options) -> Served."""
    loaded = []

    def make(template=None, **options):
        if template is not None:
            (tmp_path / "t.jinja").write_text(template)
            options["chat_template"] = str(tmp_path / "t.jinja")
        config = make_config({"models": {"m": {"path": str(model_folders["chat"]), "backend": "reference", **options}}})
        loaded.append(Served(config.models[0], 5))
        return loaded[-1]

    yield make
    for one in loaded:
        one.close()


def prompt_of(one, **fields):
    body = schemas.ChatRequest.model_validate_json(json.dumps({"messages": HI, **fields}))
    prompt = prepare(one, body, True, Ignored())
    return one.tokenizer.decode(prompt.ids, skip_special=False), prompt


@pytest.mark.parametrize(("template", "role"), [(PLAIN, "system"), (NO_SYSTEM, "user"), (DEAF, "user"),
                                                (UNKNOWN, "system")])
def test_a_template_that_knows_no_tools_is_helped(served, template, role):
    one = served(template)
    text, prompt = prompt_of(one, tools=[WEATHER])
    assert text.count('"name": "weather"') == 1 and "maxLength" in text and "%%" not in text
    assert text.index(role) < text.index("weather") < text.index("hi\n" if template is DEAF else "hi<|im_end|>")
    splitter = prompt.make_splitter()
    splitter.feed('{"name": "weather", "arguments": {"city": "Rome"}}', end=True)
    assert [call.call.name for call in splitter.reply.calls] == ["weather"]
    assert "weather" not in prompt_of(one, tools=[WEATHER], tool_choice="none")[0]


def test_a_configured_system_message_stays(served):
    text, _ = prompt_of(served(PLAIN, system_prompt="Be kind."), tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call")


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM, UNKNOWN, None])
@pytest.mark.thin(3)
def test_forced_calls_on_any_template(served, template):
    one = served(template)
    named = {"type": "function", "function": {"name": "weather"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in ("required", named, some):
        _, prompt = prompt_of(one, tools=[WEATHER], tool_choice=choice)
        found = one.model.generate(prompt.ids[-100:], max_tokens=80, temperature=1, seed=1, **prompt.settings)
        splitter = prompt.make_splitter()
        splitter.feed(found.text, end=True)
        call, = splitter.reply.calls
        assert call.call.name == "weather" and set(json.loads(call.call.arguments)) == {"city"}


def test_tools_that_are_not_allowed_are_not_shown(served):
    other = {"type": "function", "function": {"name": "lamp"}}
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "lamp"}}]}
    text, prompt = prompt_of(served(PLAIN), tools=[WEATHER, other],
                             tool_choice={"type": "allowed_tools", "allowed_tools": some})
    assert "lamp" in text and "weather" not in text and "json_schema" not in prompt.settings
    with pytest.raises(ApiError, match="not one of the tools"):
        prompt_of(served(PLAIN), tools=[WEATHER], tool_choice={"type": "allowed_tools", "allowed_tools": some})


def test_a_named_format_on_a_template_that_knows_none(served):
    text, _ = prompt_of(served(PLAIN, tool_format="hermes"), tools=[WEATHER])
    assert '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "value"}}</tool_call>' in text


def test_calls_and_results_of_before_are_told_as_text(served):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk = [*HI, {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c9", "content": "?"}]
    plain = served(PLAIN)
    for more in ({}, {"tools": [WEATHER]}):
        text, _ = prompt_of(plain, messages=talk, **more)
        assert text.endswith('<|im_start|>assistant\nWait.\n{"name": "weather", "arguments": {"city": "Rome"}}'
                             "<|im_end|>\n<|im_start|>user\nResult of weather: sunny\nResult of the function: ?"
                             "<|im_end|>\n"
                             "<|im_start|>assistant\n")
    own, _ = prompt_of(served(), messages=talk[:2], tools=[WEATHER])  # a template with tools writes them itself
    assert '<tool_call>{"name": "weather"' in own and own.startswith("<|im_start|>system\nTools: [{")


EACH, SHOWN = "{% for m in messages %}", "{{ m.role }}({{ m.content }}){% endfor %}"
LEADING = EACH + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('twice') }}{% endif %}" + SHOWN
IN_TURN = (EACH + "{% if m.role == 'system' or (not loop.first and m.role == loop.previtem.role) %}"
           "{{ raise_exception('in turn') }}{% endif %}" + SHOWN)
AGENT = ("system", "developer", "user", "system", "user", "assistant", "system", "user")


@pytest.mark.parametrize(("template", "roles", "expected"), [
    (EACH + SHOWN, AGENT[:4], "system(a)system(b)user(c)system(d)"),
    (LEADING, AGENT, "system(a|b)user(c|d|e)assistant(f)user(g|h)"),
    (IN_TURN, AGENT, "user(a|b|c|d|e)assistant(f)user(g|h)"),
    (IN_TURN, AGENT[2:4], "user(a|b)"), (IN_TURN, AGENT[:2], "user(a|b)")])
def test_what_agent_programs_send_fits_templates_that_refuse_it(served, template, roles, expected):
    talk = [{"role": role, "content": text} for role, text in zip(roles, "abcdefgh", strict=False)]
    assert prompt_of(served(template), messages=talk)[0] == expected.replace("|", "\n\n")


def test_a_template_that_refuses_the_conversation_in_any_form_says_why(served):
    with pytest.raises(TokenizerError, match="never"):
        prompt_of(served("{{ raise_exception('never') }}"), messages=[{"role": "system", "content": "A"}, *HI])


def test_thinking_that_the_template_opens_in_marks_of_its_own(served):
    one = served(PLAIN + "{% if add_generation_prompt %}[THINK]{% endif %}")
    assert one.thinks and one.think_marks == ("[THINK]", "[/THINK]") and not served(PLAIN).thinks
    splitter = prompt_of(one)[1].make_splitter()
    splitter.feed("hm[/THINK]\n\nyes", end=True)
    assert (splitter.reply.reasoning, splitter.reply.content) == ("hm", "yes")


def test_a_model_without_any_template_says_so(served):
    one = served()
    one.model.tokenizer.chat_template, one.template_tools = None, False
    with pytest.raises(TokenizerError, match="no chat template"):
        prompt_of(one, tools=[WEATHER])


@pytest.mark.parametrize("name", FORMATS)
def test_what_models_are_told_is_read_again(name):
    form, arguments = FORMATS[name], {"a": "b c", "n": [1, {"x": None}], "t": True, "s": "5"}
    splitter = Splitter(form, frozenset({"f"}))
    splitter.feed(form.text("f", arguments), end=True)
    call, = splitter.reply.calls
    assert (call.call.name, json.loads(call.call.arguments)) == ("f", arguments)
    assert form.text("NAME", {"ARGUMENT": "value"}) in tools.instructions([WEATHER], form)


def test_names_of_other_engines():
    assert find_format(None, "hermes") is FORMATS["tag_json"] and find_format(None, "llama3_json") is GENERIC
    assert find_format("[TOOL_CALLS] [ARGS]", "mistral") is FORMATS["bracket_named"]
    assert find_format("[TOOL_CALLS]", "mistral") is find_format(None, "mistral") is FORMATS["bracket_json"]
    assert find_format("<|tool_call_start|>", "pythonic") is FORMATS["pipe_python"]
    assert all(name in FORMATS for names in ALIASES.values() for name in names)
    assert set(ALIASES).isdisjoint(FORMATS)


def test_a_constraint_beside_a_forced_call_is_refused(http):
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
    for more in ({"response_format": {"type": "json_object"}}, {"guided_choice": ["a"]}, {"regex": "a"}):
        reply = http.post("/v1/chat/completions", json=body | more)
        assert reply.status_code == 400 and "contradicts a forced tool call" in reply.json()["error"]["message"]
