"""Parsing texts into content, reasoning and tool calls: the result does not depend on how a text is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numflow.server.messages.reply import THINKING, Reply, Splitter, shown_marks
from numflow.server.messages.tool_formats import FORMATS, find_format

CALL = '{"name": "f", "arguments": {"a": 1}}'


def strict_json(text):
    """The value of JSON text; NaN and Infinity are errors."""
    def refused(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refused)


def split(text, cuts=(), tools=None, **options):
    """(content, reasoning, [(name, arguments)]) of a text that arrives in pieces; checks that events give the reply."""
    splitter, emitted, at = Splitter(tools and FORMATS[tools], **options), Reply(), 0
    for cut in [*sorted(cuts), len(text)]:
        for part in splitter.feed(text[at:cut]):
            emitted.add(part)
        at = max(at, cut)
    for part in splitter.feed("", end=True):
        emitted.add(part)
    assert emitted == splitter.reply
    assert [call.index for call in emitted.calls] == list(range(len(emitted.calls)))
    return emitted.content, emitted.reasoning, [(c.call.name, strict_json(c.call.arguments)) for c in emitted.calls]


@pytest.mark.parametrize("tools, text, content, calls", [
    ("tag_json", f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", {"a": 1})]),
    ("tag_json", f"Sure.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "Sure.\n",
     [("f", {"a": 1})] * 2),
    ("tag_json", "<tool_call>{oops</tool_call> end", "<tool_call>{oops</tool_call> end", []),
    ("tag_json", "a <tool_call>" + CALL, "a ", [("f", {"a": 1})]),  # cut off after the call
    ("tag_json", 'a <tool_call>{"name": "f", "arg', 'a <tool_call>{"name": "f", "arg', []),  # cut off within the call
    ("tag_json", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("tag_json", "1 < 2 <tool", "1 < 2 <tool", []),
    ("bracket_json", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("f", {"a": 1})] * 2),
    ("bracket_named", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}', "", [("f", {"a": 1}), ("g", {})]),
    ("pipe_json", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", [("f", {"a": 1})]),
    ("pipe_python", '<|tool_call_start|>[f(a=1), a.g(b="x", c=[True])]<|tool_call_end|>ok', "ok",
     [("f", {"a": 1}), ("a.g", {"b": "x", "c": [True]})]),
    ("function_tag", '<function=f>{"a": 1}</function>', "", [("f", {"a": 1})]),
    ("tag_parameters", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
     "</function>\n</tool_call>", "", [("f", {"a": 1, "b": "x y"})]),
    ("fenced", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [("f", {"a": 1})]),
    ("plain_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("plain_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("plain_json", "An answer {", "An answer {", []),
    ("plain_python", " [f(a=1)]", "", [("f", {"a": 1})]),
    ("plain_python", "[see](there)", "[see](there)", []),
    (None, f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
])
def test_formats(tools, text, content, calls):
    names = frozenset(("f", "g"))
    assert split(text, tools=tools, names=names) == (content, "", calls)
    assert split(text, range(1, len(text)), tools=tools, names=names) == (content, "", calls)  # one by one


@pytest.mark.parametrize("text, inside, found", [
    ("<think>\nhm\n</think>\n\nyes", False, ("yes", "hm\n")), ("hm</think>\nyes", True, ("yes", "hm")),
    ("  <think>hm", False, ("", "hm")), ("yes <think>no</think>", False, ("yes <think>no</think>", "")),
    ("<thinking>", False, ("<thinking>", "")), ("<thi", False, ("<thi", "")),
    ("</think>yes", False, ("</think>yes", "")),
])
def test_thinking(text, inside, found):
    assert split(text, inside=inside)[:2] == found
    assert split(text, range(1, len(text)), inside=inside)[:2] == found
    assert split(text, thinking=False)[0] == text


def test_a_forced_call():
    assert split(CALL, range(len(CALL)), forced=True) == ("", "", [("f", {"a": 1})])
    assert split(CALL[:-4], forced=True) == (CALL[:-4], "", [])  # cut off: shown as text


MARKS = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", CALL, "{", "x", "<", "é"])


@given(st.lists(MARKS, max_size=9).map("".join), st.sets(st.integers(0, 120)), st.sampled_from([None, *FORMATS]),
       st.booleans())
def test_pieces_never_change_the_result(text, cuts, tools, inside):
    cuts = {cut for cut in cuts if cut < len(text)}
    names = frozenset("f")
    assert split(text, cuts, tools, names=names, inside=inside) == split(text, (), tools, names=names, inside=inside)


def test_the_format_is_seen_from_the_template():
    shown = {"tag_json": "{% if tools %}<tool_call>", "bracket_json": "{{ tools }} [TOOL_CALLS]",
             "tag_parameters": "{{ tools }}<tool_call><function=x><parameter=y>",
             "plain_json": '{{ tools }} {\\"name\\": x, \\"parameters\\": y}'}
    for name, template in shown.items():
        assert find_format(template) is FORMATS[name]
    assert find_format("<tool_call>") is None  # the template has no tools
    assert find_format("{{ tools }}") is None and find_format(None) is None
    assert find_format(None, "pipe_json") is FORMATS["pipe_json"]


JSON_BODIES = ['{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": [-Infinity]}}',
               '{"name": "f", "arguments": {"a": 1e999}}', '{"name": "f", "arguments": "NaN"}',
               '{"name": "f", "arguments": "{\\"a\\": -1e400}"}', '{"name": "f", "arguments": [1]}',
               '{"name": "f", "arguments": 5}', '{"name": 5}', '[1]', '{"name": "f", "arguments": "[1]"}',
               '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "[" * 5000]
PYTHON_BODIES = ["[f(a={1,2})]", "[f(a=b'x')]", "[f(a=1j)]", "[f(a=...)]", "[f(a={(1,2):3})]", "[f(a=1e999)]",
                 "[f(a=[-1e999])]", "[f(a={[1]: 2})]", "[f(a={**b})]", "[f(a=f'{x}')]", "[f(a=g())]", "[f(**a)]",
                 "[(lambda: 1)(a=1)]", "[f()(a=1)]", "[f(a=x)]", "[f(a=1+'b')]", "[f(a='\x00')]", "[f(a='\\d'", "[1]",
                 "[f(a=" + "(" * 5000, "[f(a=0x" + "f" * 5000 + ")]"]


@pytest.mark.parametrize("tools, body", [
    *((name, body) for name in ("tag_json", "bracket_json", "pipe_json", "plain_json") for body in JSON_BODIES),
    *((name, body) for name in ("pipe_python", "plain_python") for body in PYTHON_BODIES),
    *(("bracket_named", f"f[ARGS]{body}") for body in ('{"a": NaN}', '{"a": 1e999}', "[1]", "5")),
    *((name, text) for name in ("function_tag",) for text in ('f>{"a": NaN}', 'f>{"a": 1e999}')),
    *(("tag_parameters", f"<function=f>{text}</function>") for text in ('{"a": NaN}', '{"a": 1e999}')),
    ("fenced", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": NaN}\n```<｜tool▁call▁end｜>')])
def test_what_json_cannot_say_is_no_call_and_stays_text(tools, body):
    form = FORMATS[tools]
    text = form.begin + body + form.end
    assert split(text, tools=tools, names=frozenset({"f"})) == (text, "", [])


def test_a_parameter_that_is_no_json_is_text():
    text = "<tool_call><function=f><parameter=a>NaN</parameter><parameter=b>1e999</parameter></function></tool_call>"
    assert split(text, tools="tag_parameters")[2] == [("f", {"a": "NaN", "b": "1e999"})]
    assert split('<tool_call>{"name": "f", "arguments": null}</tool_call>', tools="tag_json")[2] == [("f", {})]


@pytest.mark.parametrize("marks", THINKING)
def test_thinking_between_the_marks_that_the_template_shows(marks):
    assert shown_marks(f"{{{{ x }}}}{marks.begin}") == shown_marks(f"a{marks.end}b") == marks
    text = f"{marks.begin}\nhm < 1{marks.end}\n\nyes"
    for cuts in ((), range(len(text))):
        assert split(text, cuts, marks=marks) == ("yes", "hm < 1", [])
        assert split(text.removeprefix(marks.begin), cuts, marks=marks, inside=True) == ("yes", "\nhm < 1", [])
    other = next(one for one in THINKING if one != marks)
    assert split(f"{other.begin}hm{other.end}", marks=marks)[1] == ""


def test_a_template_without_thinking_shows_no_marks():
    assert shown_marks(None) is None and shown_marks("{{ messages }} [THINKING]") is None
