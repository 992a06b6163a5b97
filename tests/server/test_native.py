"""Inferflow's interface: the request's fields, the reply, the chunks of a stream."""

import json

import pytest


def test_the_usual_request(http, model):
    reply = http.post("/", content=json.dumps({
        "text": "Write an article.", "res_prefix": "", "decoding_alg": "sample.top_p", "random_seed": 1,
        "temperature": 0.7, "max_output_len": 12, "is_streaming_mode": False}))  # without content type, as curl -d
    found = reply.json()
    expected = model.generate([{"role": "user", "content": "Write an article."}], max_tokens=12, chat=True,
                              decoding_alg="sample.top_p", seed=1, temperature=0.7)
    assert reply.status_code == 200 and found["text"] == expected.text
    assert (found["ret_code"], found["is_end"]) == ("succ", 1) and found["time_cost"] > 0
    assert found["timings"]["predicted_n"] == 12 and found["timings"]["prompt_n"] == expected.stats["prompt_tokens"]


def test_streaming_is_the_default(http):
    body = {"text": "hi", "decoding_alg": "greedy", "max_new_tokens": 50}
    whole = http.post("/", json=body | {"is_streaming_mode": 0}).json()
    text = http.post("/", json=body).text
    assert text.endswith("\n\n")
    chunks = [json.loads(chunk) for chunk in text.split("\n\n") if chunk]
    assert len(chunks) >= 2  # chunks of 16 bytes or more, and the rest
    assert all(len(chunk["text"].encode()) >= 16 for chunk in chunks[:-1])
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["is_end"] for chunk in chunks] == [0] * (len(chunks) - 1) + [1]


def test_a_response_prefix_and_a_template_of_ones_own(http, model):
    reply = http.post("/", json={
        "text": "hi", "decoding_alg": "greedy", "max_output_len": 6, "is_streaming_mode": False,
        "decoder_input_template": "{bos}Q: {query}{\\n}A:{res_prefix}", "res_prefix": " So"})
    ids = [0, *model.tokenizer.encode("Q: hi\nA: So")]
    assert reply.json()["text"] == model.generate(ids, max_tokens=6).text


def test_templates_and_defaults_of_the_configuration(http, model):
    reply = http.post("/", json={"text": "hi", "model": "limited", "is_streaming_mode": False}).json()
    expected = model.generate([0, *model.tokenizer.encode("Q: hi\nA:")], max_tokens=5)
    assert reply["text"] == expected.text and reply["timings"]["predicted_n"] == 5
    chat = http.post("/v1/chat/completions", json={"model": "limited", "messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["choices"][0]["message"]["content"] == expected.text


@pytest.mark.parametrize("body, code, said", [
    ({"text": ""}, "error.invalid_request_format", "text"),
    ({}, "error.invalid_request_format", "text is missing"),
    ({"text": "x" * 600}, "error.too_long_request", "512"),
    ({"text": "x", "decoding_alg": "sample.top_q"}, "error.invalid_request_format", "top_p"),
    ({"text": "x", "max_output_len": 1, "max_new_tokens": 1}, "error.invalid_request_format", "the same"),
    ({"text": "x", "guided_grammar": 5}, "error.invalid_request_format", "guided_grammar"),
    ({"text": "x", "encoder_input_template": "{query}"}, "error.invalid_request_format", "no encoder"),
])
def test_errors_have_both_shapes(http, body, code, said):
    reply = http.post("/", json=body)
    assert reply.status_code == 400
    found = reply.json()
    assert found["ret_code"] == code and said in found["error_text"] == found["error"]["message"]


def test_get_stat(http):
    reply = http.post("/", json={"header": {"fn": "get_stat", "user": "me"}}).json()
    assert reply["ret_code"] == "succ" and reply["models"][0]["id"] == "org/chat"


def test_an_encoder_decoder(http, model_folders):
    import numflow

    body = {"model": "translator", "text": "w0 w1", "decoding_alg": "greedy", "is_streaming_mode": False,
            "max_output_len": 5, "encoder_input_template": "{__en__}{query}{</s>}",
            "decoder_input_template": "{</s>}{__fr__}"}
    reply = http.post("/", json=body).json()
    with numflow.load(model_folders["translator"], backend="reference") as translator:
        expected = translator.generate([30, 4, 5, 2], decoder_ids=[2, 31], max_tokens=5)
    assert reply["text"] == expected.text and reply["ret_code"] == "succ"
