"""Fields of ordinary clients that have no effect: ignored, and named in a header and in the log; strict services."""

import json

import httpx
import pytest

from numflow.errors import RequestError
from numflow.server.app import make_app
from numflow.server.config.config import make_config
from numflow.server.http.errors import ApiError
from numflow.server.http.ignored import HEADER, MOST, MOST_TOLD, Ignored
from numflow.server.messages.schemas import ChatRequest, CompletionRequest
from numflow.server.messages.settings import COMPLETION_TOKENS, chat_settings, completion_settings
from numflow.server.messages.wire import parse
from numflow.server.service.service import Service
from tests.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
FUNCTION = {"type": "function", "function": {"name": "f", "cache": 1}, "strict": True}


@pytest.mark.parametrize(("path", "body", "ignored"), [
    (CHAT, HI | {"temperature": 0, "top_p": 0.95}, "top_p"), (CHAT, HI | {"temperature": 0, "top_k": 40}, "top_k"),
    (CHAT, HI | {"temperature": 0, "min_p": 0.1, "typical_p": 0.5}, "min_p, typical_p"),
    (CHAT, HI | {"tools": [], "tool_choice": "auto"}, None), (CHAT, HI | {"tools": None, "tool_choice": "none"}, None),
    (CHAT, HI | {"tool_choice": "auto"}, None), (CHAT, HI | {"chat_template_kwargs": {"enable_thinking": False}}, None),
    (CHAT, HI | {"chat_template_kwargs": {"thinking_budget": 5}}, "chat_template_kwargs.thinking_budget"),
    (CHAT, HI | {"reasoning_effort": "low"}, "reasoning_effort"), (CHAT, HI | {"verbosity": "low"}, "verbosity"),
    (CHAT, HI | {"keep_alive": "5m", "cache_prompt": True}, "keep_alive, cache_prompt"),
    (CHAT, HI | {"top_logprobs": 2}, "top_logprobs"), (CHAT, HI | {"temperature": 0, "n": 2}, None),
    (CHAT, HI | {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, HI | {"stream": True, "stream_options": {"include_usage": True, "x": 1}}, "stream_options.x"),
    (CHAT, HI | {"stream": True, "verbosity": "low"}, "verbosity"), (CHAT, HI | {"functions": []}, None),
    (CHAT, HI | {"tools": [FUNCTION]}, "tools[0].strict, tools[0].function.cache"),
    (CHAT, HI | {"mirostat_tau": 3, "repeat_last_n": 64, "top_k": -1, "seed": -1, "temperature": 1},
     "mirostat_tau, repeat_last_n"),
    (CHAT, HI | {"stop": ""}, "stop"), (CHAT, HI | {"stop": ["", "x"], "stream": True}, "stop"),
    (CHAT, HI | {"max_tokens": 3.0, "n": 1.0, "seed": 2.0, "top_k": 40.0, "temperature": 1}, None),
    (CHAT, HI | {"max_tokens": 2, "max_completion_tokens": 3, "top_p": 0, "temperature": 1}, None),
    (CHAT, HI | {"x\r\nSet-Cookie: a": 1, "é": 2}, "x??Set-Cookie??a, ?"),
    (TEXT, {"prompt": "a", "max_tokens": 1, "tempreature": 1, "use_beam": False}, "tempreature, use_beam"),
    ("/", {"text": "a", "max_output_len": 1, "max_output_length": 1, "is_streaming_mode": False}, "max_output_length"),
    ("/", {"text": "a", "max_output_len": 1, "stop": "", "is_streaming_mode": False}, "stop"),
    ("/", {"text": "a", "max_output_len": 1, "decoding_alg": "greedy", "temperature": 0.7}, "temperature"),
    ("/v1/embeddings", {"model": "encoder", "input": "a", "pooling": "cls", "input_type": "query"}, "input_type"),
    ("/tokenize", {"text": "a", "truncation": True}, "truncation"),
    ("/translate", {"model": "translator", "text": "w0", "source": "en", "target": "fr", "beam": 1}, "beam"),
    ("/apply-template", {"messages": HI["messages"], "chat_template_kwargs": {"y": 1}}, "chat_template_kwargs.y")])
@pytest.mark.thin(5)
def test_it_passes_and_is_told(http, path, body, ignored):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get(HEADER) == ignored


@pytest.mark.parametrize(("limits", "least"), [
    ({}, None), ({"max_tokens": -1}, None), ({"max_tokens": -1, "max_completion_tokens": 5}, 5),
    ({"max_tokens": 7, "max_completion_tokens": 5}, 5), ({"max_tokens": 4, "max_completion_tokens": 5}, 4),
    ({"max_tokens": 0}, 0), ({"max_tokens": 3.0}, 3)])
def test_limits_of_new_tokens(limits, least):
    body = parse(ChatRequest, json.dumps(HI | {"max_tokens": None} | limits).encode())
    assert chat_settings(body, {}, Ignored())["max_tokens"] == least
    if "max_completion_tokens" not in limits:
        body = parse(CompletionRequest, json.dumps({"prompt": "a"} | limits).encode())
        assert completion_settings(body, {}, Ignored())["max_tokens"] == (least if limits else COMPLETION_TOKENS)


@pytest.mark.parametrize("wrong", [{"max_tokens": -2}, {"max_tokens": 3.5}, {"max_tokens": "3"}, {"n": 1.5}, {"n": 0},
                                   {"top_p": -0.1}, {"seed": 0.5}, {"max_tokens": True}])
def test_what_is_no_limit(wrong):
    with pytest.raises(ApiError) as found:
        parse(ChatRequest, json.dumps(HI | wrong).encode())
    assert found.value.status == 400 and found.value.param in wrong


def test_a_top_p_of_0_is_the_likeliest_token(http):
    answers = [http.post(CHAT, json=HI | {"max_tokens": 12} | extra).json()["choices"]
               for extra in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0}, {"temperature": 2, "top_p": 0.0})]
    assert answers[0] == answers[1] == answers[2]


def test_what_is_left_out_changes_nothing(http):
    plain, more = (http.post(CHAT, json=HI | {"temperature": 0, "max_tokens": 12} | extra).json()["choices"]
                   for extra in ({}, {"top_p": 0.1, "top_k": 3, "verbosity": "low"}))
    assert plain == more


def test_the_log_says_why(http, server):
    http.post(CHAT, json=HI | {"temperature": 0, "top_p": 0.95, "tempreature": 1}, headers={"x-request-id": "told-1"})
    line = until(lambda: next((line for line in server.log if '"told-1"' in line), None), "the line of the log")
    assert json.loads(line)["ignored"] == {
        "tempreature": "there is no field 'tempreature'; did you mean 'temperature'?",
        "top_p": "top_p=0.95 has no effect at temperature 0, which is greedy; give a temperature above 0"}


def test_many_names():
    ignored = Ignored()
    ignored.update({f"name{i}" + "x" * 100: "why" for i in range(100)})
    names = ignored.header().split(", ")
    assert len(names) == MOST + 1 and names[-1] == "..." and max(map(len, names)) == 64
    with pytest.raises(ApiError, match="why"):
        Ignored(strict=True).add("a", "why")


@pytest.mark.parametrize("names", [["a", ""], [" "], ["\t", "b\r\n"], ["\U0001d755 ", "\x15"], ["x" * 63 + " y"]])
def test_names_of_any_text(http, names):
    """A value that HTTP forbids in a header, such as one with a space at its end, would end the connection."""
    for body, status in ((HI, 200), (HI | {"messages": [{"role": "user"}]}, 400)):
        content = json.dumps(body | dict.fromkeys(names, 1)).encode()
        reply = http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert reply.status_code == status
        if status == 200:
            assert reply.headers[HEADER].count(",") == len(names) - 1


@pytest.fixture
def anyio_backend():
    return "asyncio"


def client(folder, name="m", **service):
    config = make_config({"models": {name: {"path": str(folder), "backend": "reference"}}, "service": service})
    made = Service(config)
    return made, httpx.AsyncClient(transport=httpx.ASGITransport(make_app(made)), base_url="http://localhost",
                                   timeout=60)


@pytest.mark.anyio
async def test_a_strict_service(model_folders):
    service, http = client(model_folders["chat"], strict=True)
    try:
        async with http:
            for extra, param in (({"verbosity": "low"}, "verbosity"), ({"temperature": 0, "top_p": 0.9}, "top_p"),
                                 ({"tools": [FUNCTION]}, "tools[0].function.cache"), ({"reasoning_effort": "low"},
                                                                             "reasoning_effort")):
                reply = await http.post(CHAT, json=HI | extra)
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
            assert (await http.post(CHAT, json=HI | {"guided_choice": ["a"]})).status_code == 200
            assert (await http.post(CHAT, json=HI | {"model": "gpt-9"})).status_code == 404
    finally:
        await service.pool.close()


@pytest.mark.anyio
async def test_one_model_answers_to_any_name(model_folders):
    service, http = client(model_folders["chat"], "real")
    try:
        async with http:
            for path, body in ((CHAT, HI), ("/chat/completions", HI), (TEXT, {"prompt": "a", "max_tokens": 1}),
                               ("/", {"text": "a", "max_output_len": 1, "is_streaming_mode": False})):
                for name in ("gpt-3.5-turbo", "default", "", "real", None):
                    reply = await http.post(path, json=body | {"model": name})
                    assert (reply.status_code, reply.json().get("model")) == (200, "real"), reply.text
            assert (await http.get("/v1/models/gpt-4o")).json()["id"] == "real"
    finally:
        await service.pool.close()


def test_the_option_of_old_is_read(caplog):
    models = {"m": {"path": "x"}}
    assert make_config({"models": models}).strict is False
    assert make_config({"models": models, "service": {"lenient": True}}).strict is False
    assert make_config({"models": models, "service": {"lenient": False}}).strict is True
    assert "write strict = true" in caplog.text
    with pytest.raises(RequestError, match="lenient"):
        make_config({"models": models, "service": {"lenient": "yes"}})


def test_very_many_names_are_looked_up_not_searched(http):
    """Names are compared with the template's variables; only a few of the unknown names are listed."""
    many = {f"name{number}": number for number in range(6000)}
    reply = http.post(CHAT, json=HI | {"chat_template_kwargs": many | {"enable_thinking": False, "a b": 1}})
    assert reply.status_code == 200 and len(reply.headers[HEADER].split(", ")) == MOST + 1
    ignored = Ignored()
    ignored.update({f"name{number}": "why" for number in range(6000)})
    assert len(ignored.why) == MOST_TOLD
