"""Requests of the programs in docs/integrations.md, as recorded from these programs."""

import json

import pytest

QUESTION = [{"role": "user", "content": "Say hello."}]
LIST = {"type": "function", "function": {"name": "List", "description": "List files in a directory", "parameters": {
    "type": "object", "required": ["dirpath"], "properties": {"dirpath": {"type": "string", "maxLength": 8}}}}}
OWN_TOOLS = [  # from Open WebUI: one without parameters, one with defaults
    {"type": "function", "function": {"name": "now", "description": "The time.",
                                      "parameters": {"properties": {}, "type": "object"}}},
    {"type": "function", "function": {"name": "ago", "description": "A time.", "parameters": {"properties": {
        "days": {"default": 0, "description": "Days", "type": "integer"},
        "names": {"items": {"additionalProperties": True, "type": "object"}, "type": "array"}}, "type": "object"}}}]


def events(reply) -> list:
    """Events of an OpenAI stream, after a check that it ends as it should."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and lines[-1] == "[DONE]", reply.text
    return [json.loads(line) for line in lines[:-1]]


def test_open_webui_as_a_client_of_openai(http):
    name = http.get("/v1/models", headers={"Authorization": "Bearer none"}).json()["data"][0]["id"]
    found = events(http.post("/v1/chat/completions", json={"stream": True, "model": name, "messages": QUESTION}))
    assert found[-1]["choices"][0]["finish_reason"] and found[0]["choices"][0]["delta"]["role"] == "assistant"
    body = {"stream": True, "model": name, "messages": QUESTION, "max_tokens": 8, "tools": OWN_TOOLS}
    assert events(http.post("/v1/chat/completions", json=body))[-1]["choices"][0]["finish_reason"]
    title = {"model": name, "messages": QUESTION, "stream": False, "max_tokens": 8}
    assert http.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]["role"] == "assistant"
    reply = http.post("/v1/embeddings", json={"input": ["paris is large ."], "model": "encoder"}).json()
    assert reply["data"][0]["embedding"]


def test_open_webui_as_a_client_of_ollama(http):
    assert http.get("/api/version").json()["version"]
    name = http.get("/api/tags").json()["models"][0]["model"]
    assert http.get("/api/ps").status_code == 200
    body = {"model": name, "messages": QUESTION, "options": {"num_predict": 8}, "stream": True}
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    assert lines[-1]["done"] and lines[0]["message"]["role"] == "assistant"
    body = {"model": "encoder:latest", "input": ["paris is large .", "rome"]}
    assert len(http.post("/api/embed", json=body).json()["embeddings"]) == 2


def test_continue(http):
    talk = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "List files."}]
    body = {"model": "org/chat", "messages": talk, "stream": True, "tools": [LIST], "max_tokens": 60, "temperature": 0,
            "stream_options": {"include_usage": True}}
    found = events(http.post("/v1/chat/completions", json={**body, "tool_choice": "required"}))
    parts = [part for event in found if event["choices"] for part in event["choices"][0]["delta"].get("tool_calls", [])]
    assert parts[0]["id"] and parts[0]["function"]["name"] == "List" and found[-1]["usage"]["prompt_tokens"]
    call = {"id": parts[0]["id"], "type": "function", "function": {"name": "List", "arguments": '{"dirpath":"."}'}}
    talk += [{"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "hello.py (file, 12 bytes)", "tool_call_id": call["id"]}]
    assert events(http.post("/v1/chat/completions", json={**body, "max_tokens": 8}))[-1]["usage"]["completion_tokens"]
    body = {"model": "gpt-3.5-turbo", "max_tokens": 8, "temperature": 0, "stream": True, "stop": ["```"],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]}
    assert events(http.post("/v1/chat/completions", json=body))


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


def test_codex(http):
    def said(role, text):
        return {"type": "message", "id": f"msg_{text}", "role": role, "content": [{"type": "input_text", "text": text}]}

    run = {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}}
    tools = [run, {"type": "namespace", "name": "more", "description": "x", "tools": [{**run, "name": "stop"}]},
             {"type": "web_search", "external_web_access": True}]
    body = {"model": "org/chat", "stream": True, "tools": tools,
            "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"turn_id": "t"}}
    talk = [said("developer", "a"), said("developer", "b"), said("user", "c"), said("user", "d")]
    call = r'<tool_call>\{"name": "exec_command", "arguments": \{"cmd": "ls"\}\}</tool_call>'
    for regex, more, kind in ((call, [], "function_call"), ("ok", [
            {"type": "function_call", "id": "fc_1", "status": "completed", "name": "exec_command", "call_id": "c",
             "arguments": '{"cmd": "ls"}'},
            {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "x"}], "message")):
        reply = http.post("/v1/responses", json={**body, "input": [*talk, *more], "regex": regex})
        assert reply.status_code == 200, reply.text
        last = json.loads(reply.text.strip().rpartition("data: ")[2])
        assert last["type"] == "response.completed" and last["response"]["output"][0]["type"] == kind
        assert set(reply.headers["x-numflow-ignored"].split(", ")) == {
            "tools[2]", "include.reasoning.encrypted_content", "reasoning.summary", "client_metadata"}


def test_claude_code(http):
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {"model": "org/chat", "max_tokens": 300, "stream": True, "metadata": {"user_id": "{}"},
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **cached}],
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                "properties": {"command": {"type": "string"}}, "required": ["command"]}}]}
    talk = [{"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d", **cached}]},
            {"role": "system", "content": "e"}]
    used = {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}}
    more = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, used]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": False,
                                          **cached}]}]
    call = r'<tool_call>\{"name": "Bash", "arguments": \{"command": "ls"\}\}</tool_call>'
    for regex, turns, reason in ((f"hm</think>{call}", [], "tool_use"), ("hm</think>ok", more, "end_turn")):
        reply = http.post("/v1/messages?beta=true", json={**body, "messages": [*talk, *turns], "regex": regex})
        assert reply.status_code == 200, reply.text
        assert f'"stop_reason":"{reason}"' in reply.text and '"type":"thinking"' in reply.text
        assert set(reply.headers["x-numflow-ignored"].split(", ")) == {"context_management", "reasoning_effort"}
    assert http.head("/").status_code == 200
