"""The requests of programs that docs/integrations.md has recipes for, and that no test installs."""

import json

import pytest

QUESTION = [{"role": "user", "content": "Say hello."}]


def events(reply) -> list:
    """Events of a stream of OpenAI's, and that it ends as it should."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and lines[-1] == "[DONE]", reply.text
    return [json.loads(line) for line in lines[:-1]]


def test_open_webui_as_a_client_of_openai(http):
    name = http.get("/v1/models", headers={"Authorization": "Bearer none"}).json()["data"][0]["id"]
    body = {"model": name, "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": 8}
    found = events(http.post("/v1/chat/completions", json=body))
    assert found[-1]["usage"]["completion_tokens"] and found[0]["choices"][0]["delta"]["role"] == "assistant"
    title = {"model": name, "messages": QUESTION, "stream": False, "max_completion_tokens": 8, "temperature": 0.1}
    assert http.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]["role"] == "assistant"


def test_open_webui_as_a_client_of_ollama(http):
    assert http.get("/api/version").json()["version"]
    name = http.get("/api/tags").json()["models"][0]["model"]
    assert http.get("/api/ps").status_code == 200
    body = {"model": name, "messages": QUESTION, "stream": True, "options": {"num_predict": 8, "temperature": 0.7}}
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    assert lines[-1]["done"] and lines[0]["message"]["role"] == "assistant"


def test_continue(http):
    body = {"model": "gpt-3.5-turbo", "max_tokens": 8, "temperature": 0, "stream": True, "stop": ["```"],
            "messages": [{"role": "system", "content": "You are in an editor."},
                         {"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]}
    assert events(http.post("/v1/chat/completions", json=body))
    body = {"model": "encoder", "input": ["paris is large ."]}
    assert http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "Say hello."], [3, 4, 5], [[3, 4, 5], [6, 7]]])
def test_lm_eval_of_likelihoods(http, prompt):
    body = {"model": "gpt-3.5-turbo", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    for choice in choices:
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and all(value <= 0 for value in found["token_logprobs"][1:])
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["token_logprobs"])


def test_lm_eval_of_texts(http):
    body = {"model": "gpt-3.5-turbo", "messages": QUESTION, "max_tokens": 8, "temperature": 0, "stop": ["\n\n"],
            "seed": 1234}
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["role"] == "assistant"
    body = {"model": "gpt-3.5-turbo", "prompt": "Hello", "max_tokens": 8, "temperature": 0, "stop": ["\n\n"],
            "seed": 1234}
    assert "text" in http.post("/v1/completions", json=body).json()["choices"][0]


def test_lm_eval_takes_its_tokenizer_from_the_service(http):
    told = http.get("/tokenizer_info").json()
    assert told["eos_token"] and "<|im_start|>" in told["chat_template"]
    assert http.get("/tokenizer_info?model=nobody").status_code == 404

    def encode(text, **more):
        reply = http.post("/tokenize", json={"prompt": text, **more})
        assert reply.status_code == 200 and "x-numflow-ignored" not in reply.headers
        return reply.json()["tokens"]

    alone = encode("Say hello.", add_special_tokens=False)
    assert http.post("/detokenize", json={"tokens": alone}).json()["prompt"] == "Say hello."
    assert alone == http.post("/tokenize", json={"content": "Say hello."}).json()["tokens"]
    with_marks = encode("paris", model="encoder")
    assert with_marks == http.post("/tokenize", json={"model": "encoder", "text": "paris"}).json()["tokens"]
    assert with_marks[1:-1] == encode("paris", model="encoder", add_special_tokens=False)
    assert len(encode(told["eos_token"], add_special_tokens=False)) == 1
    both = {"prompt": "a", "add_special": True, "add_special_tokens": False}
    assert http.post("/tokenize", json=both).status_code == http.post("/tokenize", json={
        "prompt": "a", "text": "a"}).status_code == 400
