"""Greedy steps that run in one go: the tokens of single steps, within a block, for those that need nothing else."""

import json

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.run import pace
from numflow.errors import RequestError
from tests.engine.fake import used_blocks
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

    def counted(batch, count, entry="main"):
        at = batch.positions.copy()
        found = decode(batch, count, entry)
        steps.append(count)
        np.testing.assert_array_equal(batch.positions, at + count - 1)
        assert (at // 64 == batch.positions // 64).all()
        return found

    monkeypatch.setattr(loaded.program, "decode", counted)
    made = Model(loaded.network, loaded.program, ends=ENDS)
    made.steps = steps
    return made


def one_by_one(model, monkeypatch, prompts, **settings):
    with monkeypatch.context() as patch:
        patch.setattr(pace, "MOST_STEPS", 1)
        found = model.generate_batch(prompts, **settings)
    assert set(model.steps) <= {1}
    model.steps.clear()
    return [(one.ids, one.finish_reason) for one in found]


@pytest.mark.parametrize("settings", [{"ignore_eos": True, "max_tokens": 150}, {"max_tokens": 60}, {"max_tokens": 3}])
def test_tokens_are_those_of_single_steps(model, monkeypatch, settings):
    prompts = [[5], list(range(4, 40)), [9] * 60, [7, 8]]
    wanted = one_by_one(model, monkeypatch, prompts, **settings)
    found = [(one.ids, one.finish_reason) for one in model.generate_batch(prompts, **settings)]
    assert found == wanted and used_blocks(model) == 0
    assert max(model.steps) > 1
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


@pytest.mark.parametrize("settings", [
    {"temperature": 0.8, "seed": 1}, {"logprobs": 2}, {"repetition_penalty": 1.2}, {"num_beams": 2},
    {"speculate": "ngram"}])
def test_what_else_decides_is_asked_for_every_token(model, settings):
    assert len(model.generate([5, 6], max_tokens=9, ignore_eos=True, **settings).ids) == 9
    assert model.steps == []


def test_an_end_token_that_may_not_come_yet(model, monkeypatch):
    wanted = one_by_one(model, monkeypatch, [[5]], max_tokens=30, min_tokens=12)
    assert [(one.ids, one.finish_reason) for one in model.generate_batch([[5]], max_tokens=30, min_tokens=12)] == wanted


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
