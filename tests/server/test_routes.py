"""The other routes: tokens, templates, translation, masked words, health, metrics; and errors of every kind."""

import json
import re

import numpy as np
import pytest

from numflow.decoding.logprobs import token_logprobs
from tests.waiting import until


def test_tokens_there_and_back(http, model):
    found = http.post("/tokenize", json={"text": "Hi<s>", "with_pieces": True}).json()
    assert found["tokens"] == model.tokenizer.encode("Hi<s>") and found["pieces"][-1] == "<s>" and found["count"] == 3
    assert http.post("/tokenize", json={"text": "Hi<s>", "parse_special": False}).json()["count"] == 5
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["text"] == "Hi<s>"
    reply = http.post("/detokenize", json={"tokens": [99999]})
    assert reply.status_code == 400 and "no token 99999" in reply.json()["error"]["message"]


def test_the_prompt_of_a_conversation(http, model):
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
                      "<|im_start|>assistant\n")
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert ids == model.tokenizer.encode(prompt)
    with_tools = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert http.post("/apply-template", json=with_tools).json()["prompt"].startswith(
        '<|im_start|>system\nTools: [{"type": "function", "function": {"name": "f"}}]')
    thinking = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    assert http.post("/apply-template", json=thinking).json()["prompt"].endswith("assistant\n<think>\n")


def test_translate(http, model_folders):
    import numflow

    reply = http.post("/translate", json={"model": "translator", "text": ["w0 w1", "w2"], "source": "en",
                                          "target": "fr", "num_beams": 2}).json()
    with numflow.load(model_folders["translator"], backend="reference") as translator:
        expected = translator.translate(["w0 w1", "w2"], "en", "fr", num_beams=2)
    assert [entry["text"] for entry in reply["translations"]] == [result.text for result in expected]
    wrong = http.post("/translate", json={"model": "translator", "text": "w0", "source": "en", "target": "xx"})
    assert wrong.status_code == 400 and "no language 'xx'" in wrong.json()["error"]["message"]
    assert http.post("/translate", json={"text": "w0"}).status_code == 400


def test_fill_mask(http, model_folders):
    import numflow

    reply = http.post("/fill-mask", json={"model": "encoder", "text": "Paris is [MASK].", "top_k": 2}).json()
    with numflow.load(model_folders["encoder"], backend="reference") as encoder:
        expected = encoder.fill_mask("Paris is [MASK].", 2)
    assert [[filling["text"] for filling in gap] for gap in reply["gaps"]] == [
        [filling.text for filling in gap] for gap in expected]
    assert http.post("/fill-mask", json={"model": "encoder", "text": "Paris"}).status_code == 400


def test_a_harness_gets_log_likelihoods(http, model):
    """The request of evaluation harnesses: ids, echo, one new token, and log-probabilities of the continuation."""
    context, continuation = model.tokenizer.encode("The sky"), model.tokenizer.encode(" is blue")
    ids = context + continuation
    reply = http.post("/v1/completions", json={"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1,
                                               "temperature": 0}).json()["choices"][0]
    found = reply["logprobs"]
    expected = token_logprobs(model.logits(ids)[:-1], np.array(ids[1:]), 1)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:-1], [entry.logprob for entry in expected], atol=1e-6)
    assert sum(found["token_logprobs"][len(context):-1]) == pytest.approx(
        sum(entry.logprob for entry in expected[len(context) - 1:]), abs=1e-5)
    (likelihood,) = model.loglikelihoods([(context, continuation)])
    assert sum(found["token_logprobs"][len(context):-1]) == pytest.approx(likelihood.logprob, abs=1e-5)
    best = [max(top.values()) for top in found["top_logprobs"][1:-1]]
    np.testing.assert_allclose(best, [max(entry.logprob, entry.top[0][1]) for entry in expected], atol=1e-6)
    assert found["text_offset"] == list(range(len(ids) + 1)) and len(found["tokens"]) == len(ids) + 1
    none = http.post("/v1/completions", json={"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}).json()
    assert none["choices"][0]["text"] == "The sky is blue" and none["usage"]["completion_tokens"] == 0
    assert none["choices"][0]["logprobs"]["token_logprobs"][1:] == found["token_logprobs"][1:-1]


def test_characters_of_several_tokens(http):
    body = {"prompt": "é🙂", "echo": True, "logprobs": 0, "max_tokens": 0}
    found = http.post("/v1/completions", json=body).json()["choices"][0]
    assert found["text"] == "é🙂"
    assert found["logprobs"]["tokens"][1:] == ["bytes:\\xa9", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99",
                                               "bytes:\\x82"]
    assert found["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1]

    def texts():
        stream = http.post("/v1/completions", json={"prompt": "a", "regex": "(é🙂){3}", "stream": True,
                                                    "max_tokens": 30})
        found = [json.loads(line[6:])["choices"][0]["text"] for line in stream.text.splitlines()
                 if line.startswith("data: {")]
        assert "".join(found) == "é🙂é🙂é🙂"
        return len(found) > 2

    until(texts, "a text in pieces", 1)  # on a busy machine several come as one


def test_health_status_and_metrics(http, server):
    assert http.get("/health").json() == {"status": "ok"}
    http.post("/v1/completions", json={"prompt": "x" * 20, "max_tokens": 3})
    found = server.status()
    assert found["models"][0]["loaded"] and found["models"][0]["engine"]["kv_blocks_capacity"] > 0
    text = http.get("/metrics").text
    for name in ("requests_running", "requests_waiting", "kv_blocks_used", "prefix_hit_tokens_total",
                 "prompt_tokens_total", "generated_tokens_total", "time_to_first_token_seconds_bucket",
                 "inter_token_seconds_bucket", "request_seconds_count"):
        assert re.search(rf'^numflow_{name}{{.*model="org/chat".*}} [\d.]+', text, re.M), name
    assert 'numflow_http_requests_total{path="/v1/completions",status="200"}' in text


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/nowhere", 404), ("PUT", "/v1/models", 405), ("GET", "/v1/chat/completions", 405), ("PATCH", "/", 405),
    ("GET", "/v1/models/none", 404)])
def test_errors_of_routes(http, method, path, status):
    reply = http.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path, body, param, said", [
    (TEXT, b"{", None, "no JSON"), (TEXT, b"[1]", None, "object"), (TEXT, b"\xff", None, "no JSON"),
    (TEXT, b"[" * 100_000, None, "no JSON"), (TEXT, b'{"prompt": "\\ud800"}', None, "no JSON"),
    (TEXT, b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", None, None),
    (TEXT, {"prompt": 5}, "prompt", "string, or"), (TEXT, {"prompt": []}, "prompt", None),
    (TEXT, {"prompt": [[]]}, "prompt[0]", None), (TEXT, {"prompt": [-1]}, "prompt[0]", None),
    (TEXT, {"prompt": [10**9]}, None, "token id"), (TEXT, {}, "prompt", "missing"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "cannot fill in"),
    (TEXT, {"prompt": "a", "suffix": "b", "echo": True}, "echo", "combined with suffix"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "suffix", "cannot fill in"),
    ("/infill", {"input_prefix": "a"}, "input_suffix", "missing"),
    (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
    (TEXT, {"prompt": "a", "temperature": 1e999}, None, None),
    (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "best_of", None),
    (TEXT, {"prompt": "a", "n": 1000, "temperature": 1}, "n", "limit is 128"),
    (TEXT, {"prompt": "a", "top_k": -2}, None, "top_k"), (TEXT, {"prompt": "a", "top_k": "x"}, None, "top_k"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, None, "logit_bias"),
    (CHAT, {"messages": []}, "messages", None), (CHAT, {"messages": [{"role": "king", "content": "x"}]},
                                                 "messages[0].role", "user"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "text only"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "field"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images", "text only"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", None),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "nonsense"}}}}, None, "nonsense"),
    (CHAT, {"messages": USER, "model": "encoder"}, "model", "does not generate"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65, "pooling": "cls", "model": "encoder"}, "dimensions", "64"),
    ("/v1/embeddings", {"input": [1, 99999], "model": "encoder", "pooling": "cls"}, None, "token id 99999"),
    ("/v1/embeddings", {"input": [[1], "a"], "model": "encoder", "pooling": "cls"}, "input[0]", "string"),
    ("/v1/embeddings", {"input": [1, [2]], "model": "encoder", "pooling": "cls"}, None, "input"),
    ("/v1/embeddings", {"input": [[]], "model": "encoder", "pooling": "cls"}, None, "at least 1"),
    ("/v1/embeddings", {"input": [""]}, "input", "empty"),
    ("/tokenize", {}, "text", None), ("/detokenize", {"tokens": "a"}, "tokens", "array"),
])
def test_client_mistakes_are_400_and_name_the_field(http, path, body, param, said):
    reply = http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert param is None or error["param"] == param, error
    assert said is None or said in error["message"], error
    assert "Traceback" not in reply.text and "object at 0x" not in reply.text and "numflow." not in reply.text


def test_fields_without_effect_are_accepted(http):
    body = {"messages": USER, "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, "store": False,
            "service_tier": "auto", "parallel_tool_calls": True, "modalities": ["text"], "seed": None, "stop": None}
    assert http.post(CHAT, json=body).status_code == 200


def test_request_ids(http):
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = http.get("/health", headers={"x-request-id": "no good!"}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{24}", made)


def test_the_openapi_description(http):
    found = http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1") and "/v1/chat/completions" in found["paths"]
    assert "ChatRequest" in found["components"]["schemas"]
    text = json.dumps(found)
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', text)):
        assert name in found["components"]["schemas"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "count"), [
    ("/v1/completions", {"prompt": "a", "n": 3}, 3), ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 3}, 3)])
def test_so_many_beams_as_were_asked_for(http, path, body, count, stream):
    reply = http.post(path, json=body | {"num_beams": 4, "max_tokens": 6, "stream": stream, "ignore_eos": True})
    assert reply.status_code == 200, reply.text
    texts, reasons = {}, {}
    answers = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")] if stream \
        else [reply.json()]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        part = choice.get("delta" if stream else "message", choice)
        texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("text") or part.get("content") or "")
        reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    assert sorted(texts) == list(range(count)) and set(reasons.values()) == {"length"}
    assert len(set(texts.values())) == count and all(texts.values())
