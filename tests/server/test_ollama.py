"""Ollama's interface on the wire: lines of JSON, options, tools, thinking, facts about models, errors."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from numflow.server.http.errors import ApiError
from numflow.server.http.ignored import Ignored
from numflow.server.messages.ollama_schemas import OllamaChat
from numflow.server.protocols.ollama import fields_of
from tests.server.processes import ServerProcess
from tests.server.test_openai_client import WEATHER

HI = [{"role": "user", "content": "hi"}]
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "Rome", "days": 1\}\}</tool_call>'
GREEDY = {"temperature": 0, "num_predict": 20}


def chat(http, path="/api/chat", **fields):
    """The last line, and all lines."""
    body = {"model": "org/chat", "options": GREEDY, **({"messages": HI} if path == "/api/chat" else {}), **fields}
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    kind = "application/json" if fields.get("stream") is False else "application/x-ndjson"
    assert reply.headers["content-type"].startswith(kind)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(line["model"] == "org/chat" and line["created_at"].endswith("Z") for line in lines)
    return lines[-1], lines


def test_a_conversation(http, model):
    expected = model.generate([{"role": "user", "content": "hi"}], max_tokens=20, temperature=0)
    whole, (only,) = chat(http, stream=False)
    assert whole["message"] == {"role": "assistant", "content": expected.text} and whole is only
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 20)
    assert whole["prompt_eval_count"] == expected.stats["prompt_tokens"]
    for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(whole[name], int), name
    last, lines = chat(http)  # streamed by default
    assert "".join(line["message"]["content"] for line in lines) == expected.text and len(lines) > 3
    assert last["message"]["content"] == "" and last["eval_count"] == 20
    assert chat(http, options={"temperature": 0}, regex="yes", stream=False)[0]["done_reason"] == "stop"


def test_a_prompt_as_a_question_and_as_it_is(http, model):
    question = model.generate([{"role": "system", "content": "A"}, {"role": "user", "content": "hi"}], max_tokens=20,
                              temperature=0)
    found, _ = chat(http, "/api/generate", prompt="hi", system="A", stream=False)
    assert found["response"] == question.text
    _, lines = chat(http, "/api/generate", prompt="hi", system="A")
    assert "".join(line["response"] for line in lines) == question.text
    raw, _ = chat(http, "/api/generate", prompt="hi", raw=True, stream=False)
    expected = model.generate("hi", max_tokens=20, temperature=0)
    assert raw["response"] == expected.text
    assert raw["context"] == [*model.tokenizer.encode("hi"), *expected.ids]
    on, _ = chat(http, "/api/generate", prompt="x", raw=True, context=raw["context"], stream=False)
    assert on["prompt_eval_count"] == len(raw["context"]) + 1


def test_an_answer_that_is_begun_goes_on(http, model):
    found, _ = chat(http, messages=[*HI, {"role": "assistant", "content": "The sky"}], stream=False)
    prompt = http.post("/apply-template", json={"messages": HI}).json()["prompt"] + "The sky"
    assert found["message"]["content"] == model.generate(model.tokenizer.encode(prompt), max_tokens=20).text


@pytest.mark.parametrize("empty, path", [({"messages": []}, "/api/chat"), ({"prompt": ""}, "/api/generate")])
def test_without_a_prompt_a_model_is_loaded(http, empty, path):
    found, _ = chat(http, path, **empty, stream=False)
    assert (found["done_reason"], found["done"]) == ("load", True) and "eval_count" not in found


def test_tools(http):
    for stream in (False, True):
        last, lines = chat(http, tools=[WEATHER], regex=f"Well\\.{CALL}", stream=stream,
                           options={"temperature": 0, "num_predict": 200})
        calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
        assert [call["function"] for call in calls] == [
            {"index": 0, "name": "weather", "arguments": {"city": "Rome", "days": 1}}]
        assert "".join(line["message"]["content"] for line in lines) == "Well." and last["done_reason"] == "stop"
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    talk = [*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    found, _ = chat(http, messages=talk, tools=[WEATHER], stream=False)
    same = http.post("/tokenize", json={"tools": [WEATHER], "messages": [
        *HI, {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": {
            **function, "arguments": json.dumps(function["arguments"])}}]},
        {"role": "tool", "tool_call_id": "x", "content": "sunny"}]}).json()
    assert found["prompt_eval_count"] == same["count"]


def test_thinking(http):
    fields = {"regex": "<think>hm\nwell</think>\n\nyes", "options": {"temperature": 0, "num_predict": 60}}
    whole, _ = chat(http, **fields, stream=False)
    assert whole["message"] == {"role": "assistant", "content": "yes", "thinking": "hm\nwell"}
    _, lines = chat(http, **fields)
    assert "".join(line["message"].get("thinking", "") for line in lines) == "hm\nwell"
    made, _ = chat(http, "/api/generate", prompt="hi", **fields, stream=False)
    assert (made["response"], made["thinking"]) == ("yes", "hm\nwell")
    on, off = (chat(http, think=think, stream=False)[0]["prompt_eval_count"] for think in (True, False))
    assert on > off  # the template writes <think>


def test_the_form_of_the_answer(http):
    schema = WEATHER["function"]["parameters"]
    options = {"temperature": 1, "seed": 4, "num_predict": 120}
    whole, _ = chat(http, format=schema, options=options, stream=False)
    assert set(json.loads(whole["message"]["content"])) == {"city", "days"}
    made, _ = chat(http, "/api/generate", prompt="hi", format=schema, options=options)
    assert made["done_reason"] == "stop"
    assert chat(http, format="json", stream=False)[0]["message"]["content"].startswith("{")


def test_options_mean_what_they_mean_elsewhere(http):
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 7, "repeat_penalty": 1.3,
               "repeat_last_n": 32, "presence_penalty": 0.5, "num_predict": 12, "stop": ["never"]}
    whole, _ = chat(http, options=options, stream=False)
    names = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
    same = http.post("/v1/chat/completions", json={
        "messages": HI, **{names.get(name, name): value for name, value in options.items()}}).json()
    assert whole["message"]["content"] == same["choices"][0]["message"]["content"]
    body = {"messages": HI, "stream": False, "keep_alive": "5m", "options": {
        "num_ctx": 2048, "num_gpu": 1, "num_predict": 2, "temperature": 0, "mirostat": 0}}
    reply = http.post("/api/chat", json=body)
    assert reply.status_code == 200 and reply.headers["x-numflow-ignored"] == "options.num_ctx, options.num_gpu"
    assert chat(http, options={"temperature": 0, "num_predict": -2, "stop": ["x"]}, regex="ab", stream=False)


def test_log_probabilities(http):
    whole, _ = chat(http, logprobs=True, top_logprobs=2, stream=False)
    _, lines = chat(http, logprobs=True, top_logprobs=2)
    assert len(whole["logprobs"]) == 20 and len(whole["logprobs"][0]["top_logprobs"]) == 2
    assert [entry["token"] for line in lines for entry in line.get("logprobs", [])] == [
        entry["token"] for entry in whole["logprobs"]]


def test_models_and_their_facts(http):
    listed = http.get("/api/tags").json()["models"]
    assert [one["name"] for one in listed] == ["org/chat:latest", "encoder:latest", "translator:latest",
                                               "limited:latest"]
    first = listed[0]
    assert first["details"]["format"] == "safetensors" and first["details"]["quantization_level"] == "F32"
    assert first["size"] > 10_000 and len(first["digest"]) == 64 and first["modified_at"][:2] == "20"
    running = {one["name"]: one for one in http.get("/api/ps").json()["models"]}
    assert running["org/chat:latest"]["context_length"] == 512 and running["org/chat:latest"]["size_vram"] == 0
    for name in ("org/chat", "org/chat:latest", "gpt-3.5-turbo:latest"):
        found = http.post("/api/show", json={"model": name}).json()
        family = found["model_info"]["general.architecture"]
        assert found["model_info"][f"{family}.context_length"] == 512 and "<|im_start|>" in found["template"]
        assert found["capabilities"] == ["completion", "tools", "thinking"]
    assert "temperature" in found["parameters"]
    assert http.post("/api/show", json={"name": "encoder"}).json()["capabilities"] == ["embedding"]
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert chat(http, model="org/chat:latest", stream=False)


def test_the_models_list_has_details(http):
    first = http.get("/v1/models").json()["data"][0]
    assert first["id"] == "org/chat" and first["max_model_len"] == 512 and first["loaded"] is True
    assert first["capabilities"] == ["completion", "chat", "tools", "thinking"] and first["quantization"] == "F32"
    assert first["parameters"] > 1000 and first["owned_by"] == "numflow" and first["type"] == "model"


@pytest.mark.merge
def test_embeddings(tmp_path, model_folders):
    import numflow
    from tests.engine.published import write_case

    folder = write_case("bert", tmp_path)  # with sentence-transformers files
    for name in ("vocab.txt",):
        (folder / name).write_text((model_folders["encoder"] / name).read_text())
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    config = tmp_path / "service.toml"
    config.write_text(f'[engine]\nbackend = "reference"\n[models.encoder]\npath = "{folder}"\n')
    with ServerProcess("-c", str(config)) as server, numflow.load(folder, backend="reference") as encoder:
        import httpx

        expected = encoder.embed(["Paris is large.", "Paris"])
        reply = httpx.post(f"{server.url}/api/embed", json={"model": "encoder", "input": ["Paris is large.", "Paris"]})
        np.testing.assert_allclose(reply.json()["embeddings"], expected, atol=1e-6)
        assert reply.json()["prompt_eval_count"] == 9
        short = httpx.post(f"{server.url}/api/embed", json={"input": "Paris", "dimensions": 5}).json()["embeddings"][0]
        np.testing.assert_allclose(short, expected[1, :5] / np.linalg.norm(expected[1, :5]), atol=1e-6)
        one = httpx.post(f"{server.url}/api/embeddings", json={"model": "encoder:latest", "prompt": "Paris"}).json()
        np.testing.assert_allclose(one["embedding"], expected[1], atol=1e-6)
        assert httpx.post(f"{server.url}/api/embed", json={"input": []}).json()["embeddings"] == []
        for body in ({"input": [""]}, {"input": "a", "dimensions": 500}, {}):
            refused = httpx.post(f"{server.url}/api/embed", json=body)
            assert refused.status_code == 400 and isinstance(refused.json()["error"], str)
        gone = httpx.post(f"{server.url}/api/generate", json={"keep_alive": 0})
        assert gone.json()["done_reason"] == "unload"
        assert httpx.get(f"{server.url}/api/ps").json() == {"models": []}


def test_fetching_and_deleting(http):
    lines = http.post("/api/pull", json={"model": "org/chat"}).text.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["pulling manifest", "success"]
    assert http.post("/api/pull", json={"name": "org/chat:latest", "stream": False}).json() == {"status": "success"}
    unknown = http.post("/api/pull", json={"model": "llama9"})
    assert unknown.status_code == 404 and "no model 'llama9'" in unknown.json()["error"]
    kept = http.request("DELETE", "/api/delete", json={"model": "org/chat"})
    assert kept.status_code == 403 and "deletable" in kept.json()["error"]


@pytest.mark.parametrize("path, body, said", [
    ("/api/chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "text only"),
    ("/api/chat", {"messages": HI, "options": 5}, "options"),
    ("/api/chat", {"messages": HI, "options": {"temperature": "x"}}, "temperature"),
    ("/api/chat", {"messages": HI, "options": {"num_predict": "x"}}, "max_tokens"),
    ("/api/chat", {"messages": HI, "format": "yaml"}, "format"), ("/api/chat", {"messages": HI, "format": {
        "type": "nonsense"}}, "nonsense"), ("/api/chat", {"messages": HI, "model": "encoder"}, "does not generate"),
    ("/api/chat", {"messages": HI, "model": "other"}, "no model 'other'"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x" * 600}]}, "512"),
    ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, "cannot fill in"),
    ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "text only"),
    ("/api/generate", {"prompt": "a", "context": [99999]}, "token id"), ("/api/embed", {"input": "a"}, "pooling"),
    ("/api/show", {"model": "other"}, "no model"), ("/api/nothing", {}, "Not Found"),
    ("/api/copy", {"source": "a", "destination": "b"}, "copy"), ("/api/create", {"model": "a"}, "create"),
    ("/api/push", {"model": "a"}, "push")])
def test_mistakes_are_told_in_ollamas_shape(http, path, body, said):
    reply = http.post(path, json={"stream": False, **body})
    assert reply.status_code in (400, 404), reply.text
    assert set(reply.json()) == {"error"} and said in reply.json()["error"], reply.text


def test_a_model_that_cannot_think_says_so():
    plain = SimpleNamespace(name="plain", thinks=False, mentions=lambda name: False)
    with pytest.raises(ApiError, match="plain does not support thinking"):
        fields_of(OllamaChat(think=True), plain, Ignored())
    assert fields_of(OllamaChat(think=False), plain, Ignored())["format"] is None
