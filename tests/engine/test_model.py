"""Model on a fake program: prompts, limits, chunks, memory, errors and threads."""

import threading

import numpy as np
import pytest

from numflow.errors import RequestError, TokenizerError
from tests.engine.fake import BOS, EOS, VOCABULARY, fake_model, used_blocks, writes


def test_ids_without_a_tokenizer():
    model = fake_model(tokenizer=False)
    result = model.generate([5, 6, 7], max_tokens=4)
    assert (result.ids, result.text, result.finish_reason) == ([8, 9, 10, 11], "", "length")
    with pytest.raises(TokenizerError, match="fake has no tokenizer; give token ids"):
        model.generate("text")
    with pytest.raises(TokenizerError):
        model.generate([1], stop="x")


def test_text_in_text_out():
    result = fake_model(writes(b" world", prompt=6)).generate("hello")
    assert (result.text, result.finish_reason) == (" world", "stop")


def test_chat_and_messages_go_through_the_template():
    model = fake_model()
    model.generate("hi", chat=True, max_tokens=1)
    assert model.runner.program.batches[-1] == len("<user>hi<assistant>") + 1
    model.generate([{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}], max_tokens=1)
    assert model.runner.program.batches[-1] == len("<system>x<user>hi<assistant>") + 1
    with pytest.raises(RequestError, match="chat needs text or messages"):
        model.generate([1, 2], chat=True)


def test_end_tokens_stop_unless_they_are_ignored():
    model = fake_model(writes([65, EOS, 66]))
    assert model.generate([1], max_tokens=3).ids == [65]
    result = model.generate([1], max_tokens=3, ignore_eos=True)
    assert (result.ids, result.finish_reason, result.text) == ([65, EOS, 66], "length", "AB")


def test_no_tokens_wanted():
    result = fake_model().generate([1], max_tokens=0)
    assert (result.ids, result.finish_reason, result.stats["new_tokens"]) == ([], "length", 0)


def test_the_context_ends_a_generation():
    model = fake_model(context=10)
    assert len(model.generate([1] * 8, max_tokens=50).ids) == 3  # the last token is chosen, not run
    assert model.generate([1] * 10, max_tokens=5).finish_reason == "length"
    assert len(model.generate([1], max_tokens=None).ids) == 10
    with pytest.raises(RequestError, match="prompt has 11 tokens; the model's context is 10 tokens"):
        model.generate([1] * 11)
    with pytest.raises(RequestError, match="ids has 11 tokens"):
        model.logits([1] * 11)


def test_an_empty_prompt_is_the_start_token_if_there_is_one():
    model = fake_model(tokenizer=False)
    model.generate([], max_tokens=1)
    assert model.program.memory[(0, 0)] == BOS
    model._requests._bos = None
    with pytest.raises(RequestError, match="prompt is empty"):
        model.generate([])


@pytest.mark.parametrize(("prompt", "message"), [
    ([1, VOCABULARY], f"token id {VOCABULARY}; the vocabulary is 0 .. {VOCABULARY - 1}"), ([-1], "token id -1"),
    ([1.5], "should be a list of token ids"), ([[1, 2]], "should be a list of token ids"),
    ([[1], [2, 3]], "should be a list of token ids"), (["a"], "should be a list of token ids"),
])
def test_bad_ids(prompt, message):
    for call in (fake_model().generate, fake_model().logits):
        with pytest.raises(RequestError, match=message):
            call(prompt)


@pytest.mark.parametrize(("settings", "message"), [
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 2.5}, "max_tokens"), ({"stop": [""]}, "stop"),
    ({"stop": [3]}, "stop"), ({"temperature": -1}, "temperature"), ({"decoder_ids": [1]}, "no encoder")])
def test_bad_settings_fail_before_anything_runs(settings, message):
    model = fake_model()
    with pytest.raises(RequestError, match=message):
        model.generate([1], stream=True, **settings)
    assert model.program.batches == []


def test_seeds_repeat():
    model = fake_model(lambda history: np.zeros(VOCABULARY))
    ids = [model.generate([1], max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True).ids for seed in (3, 3, 4)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 512])
def test_prompts_run_in_chunks(chunk):
    model = fake_model(chunk=chunk)
    prompt = list(range(1, 12))
    assert model.generate(prompt, max_tokens=3).ids == [12, 13, 14]
    assert model.program.batches == [*[chunk] * ((11 - 1) // chunk), (11 - 1) % chunk + 1, 1, 1]
    rows = model.logits(prompt)
    assert rows.shape == (11, VOCABULARY)
    assert rows.argmax(1).tolist() == list(range(2, 13))
    np.testing.assert_array_equal(np.concatenate([part for _, part in model.iter_logits(prompt)]), rows)


def test_an_encoder_sees_its_text_at_once():
    model = fake_model(type="encoder", chunk=3)
    model.hidden([1, 2, 3, 4, 5])
    assert model.program.batches == [5]
    with pytest.raises(RequestError, match="is an encoder: it cannot generate"):
        model.generate([1])
    with pytest.raises(RequestError, match="computes no logits"):
        fake_model(type="encoder", outputs=("hidden",)).logits([1])
    with pytest.raises(RequestError, match="has no token types"):
        model.hidden([1], token_type_ids=[0])


def test_memory_is_reserved_by_request_and_given_back():
    model = fake_model(context=4096)
    model.generate([1, 2, 3], max_tokens=6)
    assert model.program.blocks == 3  # 9 tokens in blocks of 4, not the context
    model.generate([1] * 20, max_tokens=2000, stop="\x05")
    assert model.program.blocks == 64  # 256 tokens at first, though 2000 may come
    model.generate([1], max_tokens=600, ignore_eos=True)
    assert 600 / 4 <= model.program.blocks <= 160
    assert used_blocks(model) == 0


def test_blocks_are_free_after_an_exception():
    def fails(history):
        if len(history) == 6:
            raise KeyboardInterrupt
        return 65

    model = fake_model(fails)
    with pytest.raises(KeyboardInterrupt):
        model.generate([1], max_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        model.logits([1] * 8)
    assert used_blocks(model) == 0
    assert model.generate([1], max_tokens=3).ids == [65] * 3


def test_no_memory_for_keys_and_values():
    model = fake_model()

    def refuse(blocks, cross_blocks=0):
        raise MemoryError

    model.program.reserve = refuse
    with pytest.raises(RequestError, match="no memory for the keys and values of 3 tokens"):
        model.generate([1, 2, 3])
    assert used_blocks(model) == 0


def test_blocks_are_free_after_a_stream_is_left():
    model = fake_model()
    with model.generate([1], max_tokens=20, stream=True) as stream:
        next(stream)
        assert used_blocks(model) > 0
    assert used_blocks(model) == 0
    assert stream.result.finish_reason == "cancelled"
    forgotten = model.generate([1], max_tokens=20, stream=True)
    next(forgotten)
    del forgotten
    assert used_blocks(model) == 0


def test_a_stream_that_is_over_stays_over():
    def fails(history):
        if len(history) == 4:
            raise KeyboardInterrupt
        return 65

    model = fake_model(fails)
    whole = model.generate([1], max_tokens=2, stream=True)
    assert "".join(whole) == "AA" and next(whole, None) is None and whole.result.choices == [whole.result]
    broken = model.generate([1], max_tokens=9, stream=True)
    with pytest.raises(KeyboardInterrupt):
        list(broken)
    assert next(broken, None) is None and used_blocks(model) == 0
    closed = model.generate([1], max_tokens=2, stream=True)
    closed.close()
    assert next(closed, None) is None and closed.result.finish_reason is None  # it never began


def test_a_stream_does_not_lock_others_out():
    model = fake_model()
    stream = model.generate([10], max_tokens=5, stream=True)
    ids = [next(stream).id]
    assert model.generate([20], max_tokens=2).ids == [21, 22]
    ids += [piece.id for piece in stream][:-1]
    assert ids == [11, 12, 13, 14, 15]


def test_threads_do_not_mix():
    model, results = fake_model(context=200), {}

    def work(start):
        results[start] = model.generate([start], max_tokens=30).ids

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 40, 80, 120)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {start: list(range(start + 1, start + 31)) for start in (0, 40, 80, 120)}
    assert used_blocks(model) == 0


def test_close_closes_the_program():
    with fake_model() as model:
        pass
    assert model.program.closed
