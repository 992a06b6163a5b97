"""Streaming tool calls: whatever a model writes, the streamed arguments are valid JSON from beginning to end."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numflow.server.messages.json_pieces import JsonPieces
from numflow.server.messages.reply import Reply, Splitter
from numflow.server.messages.tool_formats import FORMATS
from tests.server.test_reply import strict_json

NAMES = frozenset(("f", "g"))
CALL = '{"name": "f", "arguments": {"a": "b c", "n": [1, {"x": null}]}}'
GIVEN = {"a": "b c", "n": [1, {"x": None}]}


def told(text, cuts=(), tools="plain_json", **options):
    """Content, calls, and the pieces of arguments, of a text that arrives in pieces."""
    splitter, emitted, at = Splitter(tools and FORMATS[tools], NAMES, pieces=True, **options), Reply(), 0
    given, begun = {}, []
    ends = [*sorted(cuts), len(text), None]
    for cut in ends:
        for part in splitter.feed("" if cut is None else text[at:cut], end=cut is None):
            emitted.add(part)
            if part.kind == "call":
                assert part.index == len(begun) and not part.call.call.arguments
                begun.append(part.call)
                given[part.index] = []
            elif part.kind == "arguments":
                given[part.index].append(part.text)
            elif part.kind == "called":
                assert (part.call.id, part.call.call.name) == (begun[-1].id, begun[-1].call.name)
                assert "".join(given[part.index]) == part.call.call.arguments
        at = max(at, cut or 0)
    assert emitted == splitter.reply and len(begun) == len(emitted.calls)
    return emitted.content, [(c.call.name, strict_json(c.call.arguments), c.broken) for c in emitted.calls], given


@pytest.mark.parametrize("tools, text, content, names", [
    ("plain_json", CALL, "", "f"), ("plain_json", f" [{CALL}, {CALL}] ", "", "ff"), ("plain_json", CALL * 2, "", "ff"),
    ("plain_json", CALL.replace('{"name"', '{"type": "function", "name"'), "", "f"),
    ("tag_json", f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call> ok", "Sure.\n ok", "ff"),
    ("tag_json", f"<tool_call>{CALL[:-1]}, \"id\": [5]}}</tool_call>", "", "f"),
    ("bracket_json", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", "ff"),
    ("bracket_named", f'[TOOL_CALLS]f[ARGS]{json.dumps(GIVEN)}[TOOL_CALLS]g[CALL_ID]x[ARGS]{{}}', "", "fg"),
    ("pipe_json", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", "f"),
    ("function_tag", f"<function=f>{json.dumps(GIVEN)}</function>", "", "f")])
def test_arguments_come_in_pieces(tools, text, content, names):
    for cuts in ((), range(1, len(text))):
        found, calls, given = told(text, cuts, tools)
        assert found.strip() == content and "".join(name for name, *_ in calls) == names
        assert calls[0] == ("f", GIVEN, False) and not any(broken for *_, broken in calls)
    assert len(given[0]) > 8  # letter by letter


@pytest.mark.parametrize("tools", FORMATS)
def test_every_format_ends_as_it_does_in_one_piece(tools):
    text = FORMATS[tools].text("f", GIVEN)
    assert told(text, range(1, len(text)), tools)[:2] == ("", [("f", GIVEN, False)])


def test_a_forced_call_and_one_that_is_cut_off():
    assert told(CALL, range(len(CALL)), forced=True)[:2] == ("", [("f", GIVEN, False)])
    cut = CALL.index("c\"")
    assert told(CALL[:cut], range(cut), forced=True)[:2] == ("", [("f", {"a": "b "}, True)])
    assert told(CALL[:CALL.index("1")], forced=True)[1] == [("f", {"a": "b c", "n": []}, True)]
    assert told(CALL[:CALL.index("n\":") + 1])[1] == [("f", {"a": "b c"}, True)]  # an incomplete key is dropped
    assert told(CALL[:15]) == (CALL[:15], [], {})  # cut before the arguments: plain text


@pytest.mark.parametrize("body, arguments, content", [
    ('{"a": NaN}}', {}, '"a": NaN}}'), ('{"a": 1e999}}', {}, '"a": 1e999}}'), ('{"a": "\n"}}', {"a": ""}, '\n"}}'),
    ('{"a": 1, b}}', {"a": 1}, ", b}}"), ('{"a": "x"]}', {"a": "x"}, "]}"), ('{"a": "\\x"}}', {"a": ""}, '\\x"}}'),
    ('{"a": ' + "[" * 100, {"a": None}, ""), ('{"a": 01}}', {}, '"a": 01}}'), ('{"a" "b"}}', {}, '"a""b"}}'),
    ('{"a": "\\ud83d\\', {"a": ""}, "")])
def test_what_is_no_json_ends_the_call_and_is_text(body, arguments, content):
    text = '{"name": "f", "arguments": ' + body
    for cuts in ((), range(1, len(text))):
        found, calls, _ = told(text, cuts)
        (_, given, broken), = calls
        assert broken
        if arguments != {"a": None}:
            assert (given, found) == (arguments, content)


def test_unknown_names_single_calls_and_other_shapes():
    assert told(CALL.replace('"f"', '"h"'))[1:] == ([], {})
    assert [name for name, *_ in told(CALL * 2, single=True)[1]] == ["f"]
    text = '{"name": "f", "arguments": "{\\"a\\": 1}"}'
    assert told(text, range(len(text)))[1] == [("f", {"a": 1}, False)]
    assert told(f"{CALL} and so on") == (" and so on".strip(), [("f", GIVEN, False)], {0: [CALL[27:-1]]})


MARKS = st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]", "<function=f>", CALL, CALL[:30], "{",
                         "}", "[", "]", '"', "\\", ",", ":", "1", "true", " ", "x", "\n",
                         '{"name": "g", "arguments": {'])


@given(st.lists(MARKS, max_size=12).map("".join), st.sets(st.integers(0, 200)), st.sampled_from([*FORMATS]),
       st.booleans(), st.booleans())
def test_pieces_never_change_the_result(text, cuts, tools, forced, single):
    cuts = {cut for cut in cuts if cut < len(text)}
    more = {"forced": forced, "single": single}
    assert told(text, cuts, tools, **more)[:2] == told(text, (), tools, **more)[:2]


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                      | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(st.dictionaries(st.text(), VALUES), st.integers(0, 400), st.booleans(), st.sampled_from([None, 1]))
@pytest.mark.merge
def test_any_object_and_any_beginning_of_it(value, cut, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    pieces, whole, held = JsonPieces(), "", ""
    for char in text:  # in each of JSON's escapes for it
        now, held = pieces.feed(held + char)
        whole += now
    assert (whole, held, pieces.state) == (json.dumps(value, ensure_ascii=False), "", "done")
    pieces = JsonPieces()
    begun, _ = pieces.feed(text[:cut])
    assert whole.startswith(begun)
    closed = begun + ("" if pieces.state == "done" else pieces.close())
    assert isinstance(strict_json(closed or "{}"), dict)
