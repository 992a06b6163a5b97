"""Expensive bodies: invalid ones, large ones, and ones that ask for more than one request may."""

import asyncio
import json
import threading
from dataclasses import fields

import httpx
import pytest
from pydantic import ValidationError

from numflow.engine.request.budget import Budget
from numflow.server.app import ENDPOINTS, Endpoint, make_app
from numflow.server.config.config import make_config
from numflow.server.http.errors import ApiError, of_error
from numflow.server.http.ignored import MOST_TOLD, Ignored
from numflow.server.messages import schemas, text_schemas
from numflow.server.messages.wire import Json, dump, dump_long, parse
from numflow.server.models.served import Served
from numflow.server.service import service as service_module
from numflow.server.service.service import LONG, READERS, Service

MANY = 3000
TALK = '"messages": [{"role": "user", "content": "a"}]'


def items(one: str) -> str:
    return "[" + ", ".join([one] * MANY) + "]"


def names(value: str) -> str:
    return ", ".join(f'"f{number}": {value}' for number in range(MANY))


@pytest.mark.parametrize(("kind", "body", "field"), [
    (schemas.CompletionRequest, f'{{"prompt": {items("{}")}}}', "prompt[0]"),
    (schemas.CompletionRequest, f'{{"prompt": {items("[{}]")}}}', "prompt[0][0]"),
    (schemas.CompletionRequest, f'{{"prompt": "a", "stop": [1, {items("1")[1:]}}}', "stop[0]"),
    (schemas.CompletionRequest, f'{{"prompt": "a", "logit_bias": {{{names("{}")}}}}}', "logit_bias"),
    (schemas.ChatRequest, f'{{"messages": {items("{}")}}}', "messages[0].role"),
    (schemas.ChatRequest, f'{{"messages": [{{"role": "user", "content": {items("{}")}}}]}}', "messages[0].content"),
    (schemas.ChatRequest, f'{{{TALK}, "tools": {items("{}")}}}', "tools[0]"),
    (schemas.ChatRequest, f'{{{TALK}, "stream_options": {{{names("1")}}}}}', "stream_options.f0"),
    (text_schemas.EmbeddingRequest, f'{{"input": "a", {names("1")}}}', "f0"),
    (text_schemas.TranslateRequest, f'{{"text": {items("{}")}}}', "text[0]"),
    (text_schemas.DetokenizeRequest, f'{{"tokens": {items("{}")}}}', "tokens[0]"),
    (text_schemas.TokenizeRequest, f'{{"messages": {items("7")}}}', "messages[0]"),
    (schemas.NativeRequest, f'{{"text": "a", "header": {{{names("1")}}}}}', "header.f0")])
def test_a_wrong_body_is_told_its_first_error(kind, body, field):
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(body)
    assert found.value.error_count() <= 8  # one error for each type that the first item could have
    with pytest.raises(ApiError) as caught:
        parse(kind, body.encode())
    assert field in caught.value.message and len(caught.value.message) < 400


def lists(schema, found):
    """Collect all lists of a pydantic core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            found.append(schema)
        for part in schema.values():
            lists(part, found)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            lists(part, found)
    return found


@pytest.mark.parametrize("kind", dict.fromkeys(endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None),
                         ids=lambda kind: kind.__name__)
def test_every_list_stops_at_its_first_error(kind):
    assert all(schema.get("fail_fast") for schema in lists(kind.__pydantic_core_schema__, []))


def in_process(routes=None, **service):
    ready = Service(make_config({"service": service, "models": {"a": {"path": "nowhere"}}}))
    ready.pool.ready = True
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(ready, routes)), base_url="http://127.0.0.1:1")


def test_large_bodies_are_read_in_few_threads(monkeypatch):
    here, most, running, lock = threading.get_ident(), [], [], threading.Lock()

    def watched(kind, data, lenient):
        if len(data) >= LONG:
            assert threading.get_ident() != here
            with lock:
                running.append(1)
                most.append(len(running))
        try:
            return parse(kind, data, lenient)
        finally:
            with lock:
                running[:] = running[1:] if len(data) >= LONG else running

    monkeypatch.setattr(service_module, "parse", watched)

    async def ask():
        async with in_process() as http:
            body = b'{"tokens": [' + b"{}, " * LONG + b"{}]}"
            return await asyncio.gather(*(http.post("/detokenize", content=body) for _ in range(8)))

    answers = asyncio.run(ask())
    assert {answer.status_code for answer in answers} == {400} and len(most) == 8 and max(most) <= READERS
    assert all(len(answer.content) < 500 for answer in answers)


def test_long_answers_are_the_same_in_pieces():
    for value in ({"a": [1, 2], "é": {"b": []}, "n": None, "x": "y"}, {"a": list(range(5000))}, {},
                  {"data": [{"v": [0.5] * 3000, "t": "a"}] * 3, "u": [[1], [2, 3]]}, {"d": [{"a": 1}] * 5000}):
        assert dump_long(value) == dump(value)


def test_keys_have_owners_that_do_not_tell_them():
    async def who(service, request):
        return Json({"owner": request.state.owner})

    async def ask(keys, *headers):
        async with in_process([Endpoint("GET", ("/who",), who)], api_keys=keys) as http:
            return [(await http.get("/who", headers=given)).json()["owner"] for given in headers]

    alice, bob = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
    first, second, again = asyncio.run(ask(["alice", "bob"], alice, bob, alice))
    assert first == again != second and "alice" not in first
    assert len(set(asyncio.run(ask([], alice, bob)))) == 1  # without keys, all clients share one budget


def test_each_limit_is_an_option(model_folders):
    limits = {field.name: 2 for field in fields(Budget)}
    config = make_config({"service": limits, "models": {"m": {"path": str(model_folders["chat"]),
                                                              "backend": "reference"}}})
    one = Served(config.models[0], 5)
    try:
        assert one.engine.budget == Budget(**limits)
    finally:
        one.close()


@pytest.mark.parametrize(("path", "body", "option"), [
    ("/v1/completions", {"prompt": "a", "num_beams": 33}, "max_beams"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "num_beams": 1000}, "max_beams"),
    ("/", {"text": "a", "num_beams": 33, "is_streaming_mode": False}, "max_beams"),
    ("/translate", {"text": "w0", "source": "en", "target": "fr", "model": "translator", "num_beams": 33}, "max_beams"),
    ("/v1/completions", {"prompt": "a", "num_beams": 17}, "max_batch"),
    ("/v1/completions", {"prompt": ["a"] * 3, "n": 43}, "max_choices"),
    ("/v1/completions", {"prompt": ["a"] * 3, "n": 1, "best_of": 43}, "max_choices"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "max_logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21},
     "max_logprobs"),
    ("/v1/completions", {"prompt": "a", "banned_tokens": [[1, 2]] * 5000}, "max_bans"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(id): 1 for id in range(5000)}}, "max_bias"),
    ("/v1/completions", {"prompt": "a", "dry_multiplier": 1, "dry_sequence_breakers": [f"{n}" for n in range(65)]},
     "max_breakers"),
    ("/v1/completions", {"prompt": "a", "regex": "a" * 70_000}, "max_grammar")])
@pytest.mark.thin(2)
def test_more_than_one_request_may_ask_for(http, path, body, option):
    reply = http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and option in error["message"] and len(reply.content) < 600, error


@pytest.mark.merge
def test_two_keys_share_no_prompts(model_folders, tmp_path):
    from tests.server.processes import ServerProcess

    path = tmp_path / "service.toml"
    path.write_text(f'[service]\napi_keys = ["alice", "bob"]\n[models.m]\npath = "{model_folders["chat"]}"\n'
                    'backend = "reference"\n')
    with ServerProcess("-c", str(path)) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        def cached(key, **fields):
            reply = http.post("/v1/completions", json={"prompt": "a secret " * 30, "max_tokens": 1, **fields},
                              headers={"Authorization": f"Bearer {key}"})
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("alice") == 0 and cached("alice") > 0
        assert cached("bob") == 0 and cached("bob") > 0
        assert cached("alice", cache_salt="mine") == 0 and cached("alice", cache_salt="mine") > 0


def test_memory_of_any_kind_is_503():
    for error in (MemoryError(), OSError(12, "Cannot allocate memory")):
        answer = of_error(error)
        assert (answer.status, answer.code) == (503, "out_of_memory") and "Retry-After" in answer.headers
    assert of_error(OSError(2, "No such file")).status == 500
    assert json.loads(dump(of_error(ValueError("x" * 10**6)).body()))["error"]["code"] == "internal_error"


def test_a_body_of_many_unknown_names_is_told_in_part():
    ignored = Ignored()
    body = parse(text_schemas.EmbeddingRequest, f'{{"input": "a", {names("1")}}}'.encode(), ignored)
    assert body.model_extra == {} and list(ignored.why) == [f"f{i}" for i in range(MOST_TOLD)]


LONG_TEXT = "the river runs through old towns " * 5000


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": LONG_TEXT}), ("/v1/completions", {"prompt": ["a", LONG_TEXT]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
    ("/", {"text": LONG_TEXT, "is_streaming_mode": False}),
    ("/", {"text": LONG_TEXT, "is_streaming_mode": False, "model": "limited"}),
    ("/fill-mask", {"text": LONG_TEXT + "[MASK]", "model": "encoder"}),
    ("/v1/embeddings", {"input": LONG_TEXT, "model": "encoder", "pooling": "mean"}),
    ("/translate", {"text": LONG_TEXT, "source": "en", "target": "fr", "model": "translator"})])
def test_far_too_long_texts_are_not_encoded(http, path, body):
    error = http.post(path, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded" and "bytes" in error["message"], error


def test_texts_that_are_cut_are_cut_before_they_are_encoded(http):
    body = {"model": "encoder", "pooling": "mean", "truncate": True}
    cut, short = (http.post("/v1/embeddings", json={**body, "input": text}).json()["data"][0]["embedding"]
                  for text in (LONG_TEXT, LONG_TEXT[:6000]))
    assert cut == short


def test_a_long_text_is_encoded_as_a_short_one(http, model):
    text = LONG_TEXT[:40_000] + " <|im_end|> é"
    for parse_special in (True, False):
        found = http.post("/tokenize", json={"text": text, "parse_special": parse_special}).json()
        parts = [model.tokenizer.encode(part, parse_special=parse_special) for part in (text[:9000], text[9000:])]
        assert found["tokens"] == [id for part in parts for id in part]
        assert found["count"] == len(found["tokens"])


@pytest.mark.merge
def test_long_answers_are_written_whole(http):
    body = {"prompt": "a", "n": 16, "max_tokens": 300, "logprobs": 2, "ignore_eos": True, "seed": 1}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [300] * 16
