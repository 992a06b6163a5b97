"""Conversations longer than the context: refused, or without their oldest turns, as the option or the request says."""

import pytest

from numflow.errors import RequestError
from numflow.server.messages.overflow import fitting, turns

httpx = pytest.importorskip("httpx")


def said(*roles):
    return [{"role": role, "content": f"{at} " + "x" * 20} for at, role in enumerate(roles)]


def test_turns_begin_with_questions():
    assert turns(said("system", "user", "assistant", "tool", "assistant", "user", "assistant", "user")) == [1, 5, 7]
    assert turns(said("assistant", "user")) == [0, 1] and turns(said("system")) == []


@pytest.mark.parametrize("most", [3, 25, 60, 90, 150, 1000])
@pytest.mark.parametrize("answer", [None, 10, -1, 10_000])
def test_as_many_turns_go_as_have_to(most, answer):
    messages = said("system", *["user", "assistant"] * 3, "user")

    def ids_of(some):
        ids = [letter for one in some for letter in one["content"]]
        if len(ids) > 2 * most:
            raise RequestError("far too long", "context_length_exceeded")
        return ids

    room = most - min(most // 4 if answer in (None, -1) else answer, most // 2)
    if most * 2 < 44:
        with pytest.raises(RequestError, match="far too long"):
            fitting(messages, ids_of, most, answer)
        return
    ids, dropped = fitting(messages, ids_of, most, answer)
    text = "".join(ids)
    assert text.startswith("0 ") and "7 " in text
    if sum(len(one["content"]) for one in messages) <= most:
        assert dropped == 0
    else:
        assert dropped == 3 or (len(ids) <= room < len(ids) + 44)


def test_over_http(http):
    body = {"model": "org/chat", "max_tokens": 4, "messages": [
        {"role": "system", "content": "Be brief."}, *[{"role": role, "content": "word " * 20} for _ in range(4)
                                                      for role in ("user", "assistant")],
        {"role": "user", "content": "and now?"}]}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    reply = http.post("/v1/chat/completions", json={**body, "overflow": "drop"})
    assert reply.status_code == 200 and reply.headers["x-numflow-ignored"] == "messages"
    assert 250 < reply.json()["usage"]["prompt_tokens"] <= 512
    items = [{"role": one["role"], "content": one["content"]} for one in body["messages"]]
    for truncation, status in (("auto", 200), ("disabled", 400)):
        reply = http.post("/v1/responses", json={"model": "org/chat", "input": items, "truncation": truncation,
                                                 "max_output_tokens": 16})
        assert reply.status_code == status, reply.text
    long = {**body, "messages": body["messages"][-1:], "max_tokens": 700, "ignore_eos": True, "temperature": 0}
    assert http.post("/v1/chat/completions", json={**long, "overflow": "shift"}).json()["usage"][
        "completion_tokens"] == 700
    long["messages"] = [{"role": "user", "content": "word " * 300}]
    assert http.post("/v1/chat/completions", json={**long, "overflow": "drop"}).status_code == 400
