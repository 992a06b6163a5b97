"""Chat completions that continue a given beginning of the assistant's answer."""


def ask(http, messages, **more):
    return http.post("/v1/chat/completions", json={"model": "org/chat", "messages": messages, "temperature": 0,
                                                   "max_tokens": 6, **more})


def test_an_answer_goes_on_from_its_beginning(http, model):
    question = {"role": "user", "content": "hi"}
    whole = ask(http, [question]).json()["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": whole[:2]}
    rest = ask(http, [question, begun], continue_final_message=True, max_tokens=4).json()["choices"][0]["message"]
    assert whole[:2] + rest["content"] == whole
    other = ask(http, [question, begun], max_tokens=4).json()["choices"][0]["message"]["content"]
    assert other != rest["content"]  # a new answer after the given one


def test_a_beginning_is_the_answer_of_a_model_that_thinks_at_once(http):
    question, begun = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    assert ask(http, [question], **thinks).json()["choices"][0]["message"]["reasoning_content"]
    reply = ask(http, [question, begun], continue_final_message=True, **thinks).json()["choices"][0]["message"]
    assert reply["content"] and "reasoning_content" not in reply


def test_what_cannot_be_gone_on_from_is_refused(http):
    for messages in ([{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "hi"}]):
        reply = ask(http, messages, continue_final_message=True)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "continue_final_message"


def test_a_token_that_is_none_of_the_text_is_marked(http):
    reply = ask(http, [{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=20,
                logit_bias={"3": 100}, max_tokens=1, ignore_eos=True).json()
    (entry,) = reply["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "<|im_end|>" and entry["special"] is True
    assert any("special" not in one for one in entry["top_logprobs"])
