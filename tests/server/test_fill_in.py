"""Fill-in-the-middle: prompts of vocabularies with FIM tokens, /infill, suffix, and requests of editor plugins."""

import json

import httpx
import pytest

from numflow.tokenizer.fill_in import _rows, find_fill_in
from tests.server import tiny
from tests.server.processes import ServerProcess

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>"]


@pytest.fixture(scope="module")
def filling(tmp_path_factory):
    """A service of a model with FIM tokens, and the model."""
    import numflow

    root = tmp_path_factory.mktemp("filling")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "SPECIAL", [*tiny.SPECIAL, *MARKS])
        folder = tiny.write_chat_model(root / "model")
    config = root / "service.toml"
    config.write_text(f'[engine]\nbackend = "reference"\n[models.m]\npath = "{folder}"\n')
    with ServerProcess("-c", str(config)) as server, numflow.load(folder, backend="reference") as model, \
            httpx.Client(base_url=server.url, timeout=60) as http:
        yield http, model


def prompt(model, before, after):
    ids = {mark: model.tokenizer.id_of(mark) for mark in MARKS}
    encode = model.tokenizer.encode
    return [ids[MARKS[0]], *encode(before), ids[MARKS[1]], *encode(after), ids[MARKS[2]]]


def test_a_prompt(filling):
    _, model = filling
    way = find_fill_in(model.tokenizer)
    assert way.ids(model.tokenizer, "ab", "c") == prompt(model, "ab", "c")
    marks = {mark: model.tokenizer.id_of(mark) for mark in MARKS}
    spelled = way.ids(model.tokenizer, MARKS[2], "")  # inside text, a mark is not a special token
    assert spelled.count(marks[MARKS[2]]) == 1 and len(spelled) == len(MARKS[2]) + 3
    first = way.ids(model.tokenizer, "a", "b", [("x.py", "y")])
    assert first == [marks["<|file_sep|>"], *model.tokenizer.encode("x.py\ny\n"), *prompt(model, "a", "b")]
    assert set(way.ends) == {marks["<|file_sep|>"], marks["<|fim_pad|>"]}


def test_the_ways_are_whole():
    for row in _rows():
        assert sorted(part for part in row["order"] if part in ("before", "after")) == ["after", "before"]
        assert len(set(row["order"])) == len(row["order"]) >= 4


def test_a_vocabulary_without_them(model):
    assert find_fill_in(model.tokenizer) is None


@pytest.mark.parametrize("stream", [False, True])
def test_suffix(filling, stream):
    http, model = filling
    expected = model.generate(prompt(model, "ab", "c"), max_tokens=9, temperature=0).text
    reply = http.post("/v1/completions", json={"prompt": "ab", "suffix": "c", "max_tokens": 9, "temperature": 0,
                                               "stream": stream})
    answers = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")] if stream \
        else [reply.json()]
    assert "".join(answer["choices"][0]["text"] for answer in answers) == expected
    made = http.post("/api/generate", json={"prompt": "ab", "suffix": "c", "stream": False, "options": {
        "num_predict": 9, "temperature": 0}}).json()
    assert made["response"] == expected and made["prompt_eval_count"] == 6
    assert http.post("/v1/completions", json={"prompt": [3], "suffix": "c"}).status_code == 400
    both = {"prompt": "ab", "suffix": "c", "json_schema": {"type": "object"}, "stop_token_ids": [5], "max_tokens": 2}
    assert http.post("/v1/completions", json=both).status_code == 200


def test_infill(filling):
    http, model = filling
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "c", "n_predict": 9, "temperature": 0,
            "input_extra": [], "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 2}
    reply = http.post("/infill", json=body)
    found, expected = reply.json(), model.generate(prompt(model, "ab", "c"), max_tokens=9, temperature=0)
    assert (found["content"], found["tokens"]) == (expected.text, expected.ids)
    assert (found["stop"], found["stop_type"], found["tokens_predicted"], found["tokens_evaluated"]) == (
        True, "limit", 9, 6)
    assert reply.headers["x-numflow-ignored"] == "samplers, cache_prompt, n_indent"
    lines = [json.loads(line[6:]) for line in http.post("/infill", json=body | {"stream": True}).text.splitlines()
             if line]
    assert "".join(line["content"] for line in lines) == expected.text
    assert [line["stop"] for line in lines] == [False] * (len(lines) - 1) + [True]
    stopped = http.post("/infill", json=body | {"stop": [expected.text[3:5]]}).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", expected.text[3:5])
    extra = http.post("/infill", json=body | {"input_extra": [{"filename": "x", "text": "y"}]}).json()
    assert extra["tokens_evaluated"] == 6 + 5


def test_what_programs_ask_of_the_service(filling):
    http, model = filling
    assert "insert" in http.get("/v1/models").json()["data"][0]["capabilities"]
    assert "insert" in http.post("/api/show", json={"model": "m"}).json()["capabilities"]
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["bos_token"] == "<s>"
    assert props["total_slots"] == 32 and "<|im_start|>" in props["chat_template"]
    slots = http.get("/slots?model=m").json()
    assert len(slots) == 32 and slots[0] == {"id": 0, "n_ctx": 512, "is_processing": False}
    found = http.post("/tokenize", json={"content": "hi", "add_special": True}).json()
    assert found["tokens"] == model.tokenizer.encode("hi")
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["content"] == "hi"


def test_props_of_models_that_are_not_loaded_or_write_nothing(http):
    assert http.get("/props?model=translator").status_code in (200, 503)
    assert http.get("/slots?model=other").status_code == 404
    http.post("/fill-mask", json={"model": "encoder", "text": "Paris is [MASK]."})
    assert http.get("/slots?model=encoder").status_code == 400
