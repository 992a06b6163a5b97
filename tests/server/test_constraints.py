"""Constraints under the names of other engines: each is enforced or refused; none is silently dropped."""

import json
import re

import pytest

from numflow.server.http.errors import ApiError
from numflow.server.messages.constraints import ANY_OBJECT, refuse, take
from numflow.server.messages.schemas import ResponseFormat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("given", "kind", "content"), [
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA), ({"guided_json": json.dumps(SCHEMA)}, "json_schema",
                                                       json.dumps(SCHEMA)),
    ({"json_schema": SCHEMA}, "json_schema", SCHEMA), ({"guided_json": {}}, "json_schema", {}),
    ({"regex": "a+"}, "regex", "a+"), ({"guided_regex": "a+"}, "regex", "a+"), ({"regex_pattern": "a+"}, "regex", "a+"),
    ({"guided_choice": ["a.b", "c"]}, "regex", r"a\.b|c"), ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ({"guided_grammar": "x"}, "grammar", "x"), ({"grammar": "x"}, "grammar", "x"),
    ({"grammar_string": "x"}, "grammar", "x"), ({"grammar": {"type": "regex", "value": "a"}}, "regex", "a"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema", SCHEMA),
    ({"format": "json"}, "json_schema", ANY_OBJECT), ({"format": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json_object": True}, "json_schema", ANY_OBJECT),
    ({"structured_outputs": {"choice": ["a"]}}, "regex", "a"), ({"structured_outputs": {"json": SCHEMA}}, "json_schema",
                                                                SCHEMA),
    ({"structured_outputs": {"regex": "a", "grammar": None, "backend": "x"}}, "regex", "a"),
    ({"guided_decoding": {"grammar": "x"}}, "grammar", "x"),
    ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "regex", "a")])
def test_fields_of_other_engines(given, kind, content):
    extra = {**given, "other": 1}
    assert take(extra) == {kind: content} and extra == {"other": 1}


@pytest.mark.parametrize("given", [{}, {"guided_json": None}, {"format": ""}, {"guided_json_object": False},
                                   {"structured_outputs": {"choice": None}}, {"structured_outputs": None}])
def test_nothing_is_asked_for(given):
    assert take(dict(given)) == {}


@pytest.mark.parametrize(("given", "kind", "content"), [
    ({"type": "json_object"}, "json_schema", ANY_OBJECT), ({"type": "json_object", "schema": SCHEMA}, "json_schema",
                                                           SCHEMA),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "json_schema", SCHEMA),
    ({"type": "json_schema", "schema": SCHEMA}, "json_schema", SCHEMA),
    ({"type": "json", "value": SCHEMA}, "json_schema", SCHEMA), ({"type": "regex", "pattern": "a"}, "regex", "a"),
    ({"type": "regex", "value": "a"}, "regex", "a"), ({"type": "grammar", "grammar": "x"}, "grammar", "x"),
    ({"type": "choice", "choices": ["a", "b"]}, "regex", "a|b")])
def test_response_formats(given, kind, content):
    assert take({}, ResponseFormat(**given)) == {kind: content}
    assert take({}, ResponseFormat(type="text")) == {}


@pytest.mark.parametrize(("given", "param"), [
    ({"guided_json": 5}, "guided_json"), ({"guided_choice": []}, "guided_choice"), ({"guided_choice": "a"},
                                                                                   "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"), ({"regex": ["a"]}, "regex"), ({"format": "yaml"}, "format"),
    ({"guided_regex": 5}, "guided_regex"), ({"structured_outputs": {"structural_tag": "x"}},
                                            "structured_outputs.structural_tag"),
    ({"structured_outputs": "json"}, "structured_outputs"), ({"structured_outputs": {"whitespace_pattern": "x"}},
                                                             "structured_outputs.whitespace_pattern"),
    ({"regex": "a", "guided_regex": "b"}, "guided_regex"), ({"grammar": {"type": "magic"}}, "grammar.type"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice")])
def test_constraints_that_cannot_be_met(given, param):
    with pytest.raises(ApiError) as caught:
        take(dict(given))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("name", "value"), [
    ("grammar_file", "x.gbnf"), ("response_schema", {"type": "object"}), ("responseSchema", {"type": "object"}),
    ("response_mime_type", "application/json"), ("structural_tag", {"a": 1}), ("guided_whitespace_pattern", " "),
    ("json_mode", True), ("output_format", {"type": "json_schema"}), ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}), ("stop_regex", "a"), ("extra_body", {"guided_json": {}}),
    ("nvext", {"guided_choice": ["a"]}), ("options", {"a": [{"format": "json"}]}), ("images", ["x"]),
    ("text", {"format": {"type": "json_schema"}}), ("allowed_token_ids", [1]), ("bad_words", ["x"]),
    ("GUIDED_JSON", {"a": 1}), ("lark-grammar", "x"), ("web_search_options", {"a": 1})])
def test_unknown_constraints_are_refused(name, value):
    with pytest.raises(ApiError, match="not supported"):
        refuse(name, value)


@pytest.mark.parametrize(("name", "value"), [
    ("verbosity", "low"), ("keep_alive", "5m"), ("cache_prompt", True), ("guided_decoding_backend", "xgrammar"),
    ("functions", []), ("function_call", "auto"), ("response_schema", None), ("json_mode", False), ("top_a", 0.1),
    ("extra_body", {"top_k": 5}), ("options", {"num_ctx": 4096, "format": ""}), ("prediction", {"type": "content"}),
    ("guidance_scale", 1.5), ("logit_processors", ["x"]), ("text", {"verbosity": "low", "format": {"type": "text"}}),
    ("stream_format", "sse")])
def test_what_is_no_constraint(name, value):
    if name == "text":
        value = {"verbosity": "low"}
    refuse(name, value)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/"])
@pytest.mark.parametrize(("given", "pattern"), [
    ({"guided_choice": ["yes.", "no."]}, r"(yes|no)\."), ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"ebnf": 'root ::= "x" "y"'}, "xy"), ({"format": {"type": "boolean"}}, "true|false"),
    ({"guided_json": {"enum": [12]}}, "12")])
@pytest.mark.thin(5)
def test_the_text_follows_them(http, path, given, pattern):
    body = {"temperature": 1, "max_tokens": 20, **given}
    if path == "/":
        del body["max_tokens"]
        reply = http.post(path, json={**body, "text": "hi", "is_streaming_mode": False, "max_output_len": 20}).json()
        text = reply["text"]
    elif path == CHAT:
        text = http.post(path, json={**body, "messages": USER}).json()["choices"][0]["message"]["content"]
    else:
        text = http.post(path, json={**body, "prompt": "a"}).json()["choices"][0]["text"]
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("extra", [
    {"extra_body": {"guided_json": {"type": "object"}}}, {"guided_regex": "("}, {"structured_outputs": {"tag": "x"}},
    {"response_format": {"type": "structural_tag"}}, {"function_call": {"name": "f"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_over_http_none_is_left_out(http, path, extra):
    reply = http.post(path, json={"messages": USER} | extra if path == CHAT else {"prompt": "a"} | extra)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
