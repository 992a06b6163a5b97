"""Batches of requests, and the sequences of a beam search in KV memory."""

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.run.forward_job import ForwardJob
from numflow.engine.run.job import Job
from numflow.engine.runner.texts import Text
from numflow.engine.schedule.scheduler import StepLimits
from numflow.errors import RequestError
from tests.engine.fake import EOS, VOCABULARY, FakeProgram, FakeTokenizer, fake_model, network, used_blocks
from tests.engine.published import write_case
from tests.engine.tiny import write_checkpoint


def noisy(history):
    """Random logits that follow from all that was written; the end token comes now and then."""
    row = np.random.default_rng(history).normal(0, 2, VOCABULARY).astype(np.float32)
    row[EOS] += 3
    return row


def model_of(program, context=64, chunk=512, sequences=64, tokens=512):
    model = Model(network(context), program, FakeTokenizer, ends=frozenset({EOS}), chunk=chunk)
    model.core.open(StepLimits(sequences, tokens))
    return model


def plain_beams(prompt, width, steps):
    """Beam search without end tokens and without any memory."""
    beams = [((), 0.0)]
    for _ in range(steps):
        options = []
        for ids, score in beams:
            row = noisy([*prompt, *ids]).astype(np.float64)
            row -= np.log(np.exp(row).sum())
            options += [((*ids, id), score + row[id]) for id in range(VOCABULARY)]
        beams = sorted(options, key=lambda option: -option[1])[:width]
    return list(beams[0][0]), beams[0][1] / steps


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3, 4], list(range(1, 11))])
def test_every_beam_keeps_its_own_history(prompt):
    model = model_of(FakeProgram(noisy), chunk=3)
    result = model.generate(prompt, max_tokens=9, num_beams=4, ignore_eos=True)
    ids, score = plain_beams(prompt, 4, 9)
    assert result.ids == ids
    assert result.score == pytest.approx(score)
    assert used_blocks(model) == 0
    assert model.program.moved > 0


def test_beams_run_only_their_new_tokens():
    model = model_of(FakeProgram(noisy))
    model.generate([1, 2], max_tokens=12, num_beams=4, ignore_eos=True)
    assert sum(model.program.batches) == 2 + 11 * 4


PROMPTS = [[1], [2, 3, 4, 5, 6], "hello", list(range(40)), [9, 9], "wörld"]
SETTINGS = [{}, {"temperature": 1.0, "seed": 4}, {"num_beams": 3}, {"num_beams": 2, "no_repeat_ngram": 2},
            {"stop": "\x05"}, {"min_tokens": 4}, {"max_tokens": 0}, {"max_tokens": 0, "num_beams": 2}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_requests_do_not_notice_each_other(settings):
    alone = [model_of(FakeProgram(noisy)).generate(prompt, **{"max_tokens": 8, **settings}) for prompt in PROMPTS]
    for sequences, tokens in ((64, 512), (4, 512), (64, 5)):  # all at once, some at once, a few tokens at a time
        model = model_of(FakeProgram(noisy), sequences=sequences, tokens=tokens)
        together = model.generate_batch(PROMPTS, **{"max_tokens": 8, **settings})
        for one, other in zip(alone, together, strict=True):
            assert (one.ids, one.text, one.finish_reason, one.score) == (
                other.ids, other.text, other.finish_reason, other.score)
        assert used_blocks(model) == 0


def test_requests_wait_for_room():
    model = model_of(FakeProgram(lambda history: (history[-1] + 1) % 256), sequences=4)
    model.generate_batch([[1], [2], [3], [4], [5]], max_tokens=3)
    assert model.program.batches == [4, 4, 4, 1, 1, 1]
    model = model_of(FakeProgram(noisy))
    assert model.generate_batch([]) == []


def test_a_stop_string_ends_a_request_and_not_the_others():
    model = model_of(FakeProgram(lambda history: (history[-1] + 1) % 128))
    first, second = model.generate_batch([[60], [80]], max_tokens=20, stop="@A")
    assert (first.text, first.finish_reason) == ("=>?", "stop_string")
    assert (len(second.ids), second.finish_reason) == (20, "length")
    assert model.program.batches == [2] * 5 + [1] * 15


def test_the_context_ends_beams_too():
    model = model_of(FakeProgram(noisy), context=10)
    result = model.generate([1] * 8, max_tokens=50, num_beams=3, ignore_eos=True)
    assert (len(result.ids), result.finish_reason) == (3, "length")
    assert len(model.generate([1] * 10, max_tokens=None, num_beams=3, ignore_eos=True).ids) == 1


def test_memory_is_free_after_an_exception():
    def fails(history):
        if len(history) == 7:
            raise KeyboardInterrupt
        return noisy(history)

    model = model_of(FakeProgram(fails))
    with pytest.raises(KeyboardInterrupt):
        model.generate_batch([[1], [2, 3]], max_tokens=20, num_beams=3, ignore_eos=True)
    assert used_blocks(model) == 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_what_is_read_makes_place_and_goes_on(preemption):
    expected = model_of(FakeProgram(noisy)).logits(list(range(30)))
    model = Model(network(64), FakeProgram(noisy), FakeTokenizer, ends=frozenset({EOS}), chunk=3)
    core = model.core
    core.open(StepLimits(preemption=preemption), blocks=12)
    job = core.submit(Job(model.request([1], {"max_tokens": 40, "ignore_eos": True}), model.text_decoder))
    for _ in range(14):
        core.step()
    reading = core.submit(ForwardJob(Text(np.arange(30, dtype=np.int32)), "logits", VOCABULARY, 100, causal=True))
    core.drive(reading)
    np.testing.assert_array_equal(reading.result, expected)
    core.drive(job)
    assert core.scheduler.counts["preemptions"] == 1
    assert job.results[0].ids == model_of(FakeProgram(noisy)).generate([1], max_tokens=40, ignore_eos=True).ids
    core.scheduler.swap_space.settle()
    assert used_blocks(model) == core.host.allocator.used == 0


def test_min_tokens_and_a_reason_to_stop():
    model = fake_model(lambda history: EOS)
    assert model.generate([1]).finish_reason == "stop"
    result = model.generate([1], min_tokens=3)
    assert (len(result.ids), EOS in result.ids, result.finish_reason) == (3, False, "stop")
    result = model.generate([1], min_tokens=2, num_beams=2)
    assert (len(result.ids), result.finish_reason) == (2, "stop")


@pytest.mark.parametrize(("settings", "message"), [
    ({"num_beams": 2, "temperature": 1.0}, "a beam search does not sample"),
    ({"num_beams": 2, "stop": "x"}, "does not look for stop strings"),
    ({"num_beams": 2, "stream": True}, "knows its text only at the end"),
    ({"num_beams": 0}, "num_beams should be"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens=9 is more than the 5"),
    ({"min_tokens": -1}, "min_tokens should be"),
    ({"no_repeat_ngram": 1.5}, "no_repeat_ngram should be"),
    ({"num_beam": 3}, "there is no setting 'num_beam' for generating; did you mean 'num_beams'")])
def test_settings_that_contradict_each_other(settings, message):
    model = fake_model()
    with pytest.raises(RequestError, match=message):
        model.generate([1], **settings)
    assert model.program.batches == []


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_decoder_alone_and_in_company(backend, tmp_path):
    prompts = [[5], list(range(1, 30)), [7, 8, 9], [7, 8, 10, 11]]
    with load(write_checkpoint(tmp_path), backend=backend, activations="f32") as model:
        for settings in ({}, {"num_beams": 4}):
            together = model.generate_batch(prompts, max_tokens=25, **settings)
            alone = [model.generate(prompt, max_tokens=25, **settings) for prompt in prompts]
            assert [one.ids for one in together] == [one.ids for one in alone]
            if backend == "cpu":
                assert [one.score for one in together] == [one.score for one in alone]
        rows = model.logits_batch(prompts)
        for prompt, found in zip(prompts, rows, strict=True):
            np.testing.assert_allclose(found, model.logits(prompt), rtol=0, atol=0 if backend == "cpu" else 1e-5)
        assert used_blocks(model) == 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_encoder_decoder_alone_and_in_company(backend, tmp_path):
    sources = [[5, 6, 2], list(range(40)), [9], [100, 101, 102, 103, 104]]
    with load(write_case("m2m100", tmp_path, eos_token_id=2), backend=backend) as model:
        for settings in ({}, {"num_beams": 3}):
            together = model.generate_batch(sources, max_tokens=20, **settings)
            alone = [model.generate(source, max_tokens=20, **settings) for source in sources]
            assert [one.ids for one in together] == [one.ids for one in alone]
            if backend == "cpu":
                assert [one.score for one in together] == [one.score for one in alone]
        decoders = [[2], [2, 30, 7], [2, 31], [2, 5, 6, 7, 8]]
        rows = model.logits_batch(decoders, sources)
        for decoder, source, found in zip(decoders, sources, rows, strict=True):
            expected = model.logits(decoder, encoder_ids=source)
            np.testing.assert_allclose(found, expected, rtol=0, atol=0 if backend == "cpu" else 1e-5)
        with pytest.raises(RequestError, match="4 texts need as many encoder_texts, there are 3"):
            model.logits_batch(decoders, sources[:3])
        with pytest.raises(RequestError, match="needs encoder_ids"):
            model.logits_batch(decoders)
        assert used_blocks(model) == 0


def test_a_forced_last_token_is_no_end_of_its_own(tmp_path):
    with load(write_case("bart", tmp_path, eos_token_id=2, forced_eos_token_id=2), backend="reference") as model:
        for settings in ({}, {"num_beams": 2}):
            cut = model.generate([5, 6, 7], max_tokens=4, **settings)
            assert (len(cut.ids), cut.finish_reason) == (3, "length")
            assert len(model.generate([5, 6, 7], max_tokens=4, ignore_eos=True, **settings).ids) == 4


def test_a_forced_last_token_that_is_no_token(tmp_path):
    folder = write_case("bart", tmp_path, eos_token_id=2, forced_eos_token_id=500)
    refused = pytest.raises(RequestError, match="forced_eos_token_id of the model's files has token id 500")
    with load(folder, backend="reference") as model, refused:
        model.generate([5, 6])
