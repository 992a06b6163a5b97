"""Multi-step decoding: the tokens of single steps, within a block, for requests that need only logits."""

import json

import numpy as np
import pytest

from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.run import pace
from numflow.errors import RequestError
from tests.engine.fake import FakeTokenizer, used_blocks
from tests.engine.tiny import CONFIG, write_checkpoint

ENDS = frozenset({2, 3})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 256}))
    with load(folder, threads=2) as model:
        yield model


@pytest.fixture
def model(loaded, monkeypatch):
    """The tiny decoder with nothing in its memory, and in `.steps` how many steps ran in one go each time."""
    steps, decode = [], loaded.program.decode

    def counted(batch, count, choices=None, entry="main"):
        at = batch.positions.copy()
        found = decode(batch, count, choices, entry)
        steps.append(count)
        np.testing.assert_array_equal(batch.positions, at + count - 1)
        assert (at // 64 == batch.positions // 64).all()
        return found

    monkeypatch.setattr(loaded.program, "decode", counted)
    monkeypatch.setattr(pace, "FRAME_S", 60.0)  # however slow a step is beside other work
    made = Model(loaded.network, loaded.program, ends=ENDS)
    made.steps = steps
    return made


DRAWN = {"temperature": 1.1, "seed": 3}


def by_the_host(model, prompts, **settings):
    """Texts whose tokens the sampler picks from rows of logits."""
    made = Model(model.network, model.program, ends=ENDS)
    made.core._pace._can = False
    found = made.generate_batch(prompts, **settings)
    assert model.steps == []
    return [(one.ids, one.finish_reason) for one in found]


def one_by_one(model, monkeypatch, prompts, **settings):
    with monkeypatch.context() as patch:
        patch.setattr(pace, "MOST_STEPS", 1)
        found = model.generate_batch(prompts, **settings)
    assert set(model.steps) <= {1}
    model.steps.clear()
    return [(one.ids, one.finish_reason) for one in found]


@pytest.mark.parametrize("settings", [{"ignore_eos": True, "max_tokens": 150}, {"max_tokens": 60}, {"max_tokens": 3}])
@pytest.mark.parametrize("drawn", [
    {}, DRAWN, {**DRAWN, "top_p": 0.8}, {**DRAWN, "min_p": 0.02, "top_k": 9, "n": 2}], ids=str)
@pytest.mark.thin(3)
def test_tokens_are_those_of_single_steps(model, monkeypatch, settings, drawn):
    settings = {**settings, **drawn}
    prompts = [[5], list(range(4, 40)), [9] * 60, [7, 8]]
    wanted = by_the_host(model, prompts, **settings)
    assert one_by_one(model, monkeypatch, prompts, **settings) == wanted
    found = [(one.ids, one.finish_reason) for one in model.generate_batch(prompts, **settings)]
    assert found == wanted and used_blocks(model) == 0
    assert max(model.steps) > 1
    if "n" not in settings:
        assert model.core.counts["new_tokens"] == 2 * sum(len(ids) for ids, _ in wanted)


def test_who_ends_leaves_the_others(model):
    lengths = (3, 14, 40)
    alone = [model.generate([5, at], max_tokens=length, ignore_eos=True).ids for at, length in enumerate(lengths)]
    streams = [model.generate([5, at], max_tokens=length, ignore_eos=True, stream=True)
               for at, length in enumerate(lengths)]
    found = [[] for _ in streams]
    for _ in range(60):
        for ids, stream in zip(found, streams):
            ids += [piece.id for piece in [next(stream, None)] if piece is not None and piece.id is not None]
    assert found == alone and used_blocks(model) == 0


def test_company_changes_no_token(model):
    """Greedy and drawn requests side by side, now and then with one whose tokens the host picks."""
    wanted = [{}, DRAWN, {"temperature": 0.7, "seed": 9, "top_p": 0.9}, {**DRAWN, "logprobs": 1},
              {**DRAWN, "repetition_penalty": 1.2}, {**DRAWN, "n": 2}]
    lengths = (90, 80, 70, 20, 11, 35)
    alone = [by_the_host(model, [[5, at]], max_tokens=length, ignore_eos=True, **one)[0][0]
             for at, (length, one) in enumerate(zip(lengths, wanted))]
    with Engine(model) as engine:
        handles = [engine.submit([5, at], max_tokens=length, ignore_eos=True, **one)
                   for at, (length, one) in enumerate(zip(lengths, wanted))]
        assert [handle.results()[0].ids for handle in handles] == alone
    assert max(model.steps) > 1 and used_blocks(model) == 0


@pytest.mark.parametrize("settings", [
    {**DRAWN, "logprobs": 2}, {**DRAWN, "typical_p": 0.9}, {"logprobs": 2}, {"repetition_penalty": 1.2},
    {"num_beams": 2}, {"speculate": "ngram"}])
def test_what_else_decides_is_asked_for_every_token(model, settings):
    assert len(model.generate([5, 6], max_tokens=9, ignore_eos=True, **settings).ids) == 9
    assert model.steps == []


@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=str)
def test_an_end_token_that_may_not_come_yet(model, monkeypatch, drawn):
    settings = {**drawn, "max_tokens": 30, "min_tokens": 12}
    wanted = one_by_one(model, monkeypatch, [[5]], **settings)
    assert [(one.ids, one.finish_reason) for one in model.generate_batch([[5]], **settings)] == wanted


def test_a_text_that_ends_in_the_midst(model):
    """Of drawn texts some end by an end token, and what ran behind it is thrown away."""
    settings = {"temperature": 1.5, "max_tokens": 40}
    wanted = [by_the_host(model, [[5]], seed=seed, **settings)[0] for seed in range(12)]
    found = [model.generate([5], seed=seed, **settings) for seed in range(12)]
    assert [(one.ids, one.finish_reason) for one in found] == wanted
    assert sum(reason == "stop" for _, reason in wanted) > 3 and used_blocks(model) == 0


@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=str)
def test_a_stop_string_in_the_midst(model, drawn):
    """The text ends before what came behind it in the same go."""
    settings = {"max_tokens": 60, "ignore_eos": True, **drawn}
    ids = model.generate([5, 6], **settings).ids
    at = next(at for at in range(10, 60) if ids[at] not in ids[:at])
    model.steps.clear()
    texts = Model(model.network, model.program, FakeTokenizer, ends=ENDS)
    found = texts.generate([5, 6], stop=[chr(ids[at])], **settings)
    assert (found.ids, found.finish_reason) == (ids[:at + 1], "stop_string")
    assert found.text == "".join(map(chr, ids[:at])) and used_blocks(texts) == 0
    assert sum(model.steps) >= at and max(model.steps) > 1


def test_logprobs_and_samples_change_no_token(model):
    """The host picks them from logits: the first token of several samples, all of a request with log-probabilities."""
    plain = model.generate([5, 6], max_tokens=30, ignore_eos=True, **DRAWN).ids
    assert model.generate([5, 6], max_tokens=30, ignore_eos=True, logprobs=1, **DRAWN).ids == plain
    assert model.generate([5, 6], max_tokens=30, ignore_eos=True, n=3, **DRAWN).choices[0].ids == plain


def test_logits_that_are_not_finite(model, monkeypatch):
    decode = model.program.decode
    monkeypatch.setattr(model.program, "decode", lambda *args: np.where(np.arange(args[1]) < 1, decode(*args).T, -1).T)
    with pytest.raises(RequestError, match="logits are not finite"):
        model.generate([5], max_tokens=90, ignore_eos=True)
    assert used_blocks(model) == 0


def test_slow_steps_run_one_at_a_time(model, monkeypatch):
    monkeypatch.setattr(pace, "FRAME_S", 1e-9)
    model.generate([5], max_tokens=12, ignore_eos=True)
    assert set(model.steps) == {1}
