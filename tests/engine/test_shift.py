"""Context shift: the older half of a full context is dropped, and the rest is recomputed."""

import pytest

import numflow
from numflow.engine.run.job import SINKS
from numflow.errors import RequestError
from tests.engine.test_state import write_recurrent
from tests.engine.tiny import write_checkpoint

TEXT = [4 + (7 * i * i + i) % 41 for i in range(20)]
ANSWER = {"ignore_eos": True, "temperature": 0.0}
CONTEXT = 48


@pytest.fixture(scope="module", params=["attention", "recurrent"])
def model(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param) / "model"
    folder = write_recurrent(place) if request.param == "recurrent" else write_checkpoint(place)
    with numflow.load(folder, backend="reference", context=CONTEXT) as model:
        yield model


def by_hand(model, count):
    """The text of requests for one token each, of what is left of the text before."""
    ids, new = list(TEXT), []
    while len(new) < count:
        if len(ids) >= CONTEXT:
            del ids[SINKS:SINKS + (len(ids) - SINKS) // 2]
        new += model.generate(ids, max_tokens=1, **ANSWER).ids
        ids.append(new[-1])
    return new


@pytest.mark.merge
def test_a_text_goes_on_beyond_the_context(model):
    wanted = by_hand(model, 90)
    found = model.generate(TEXT, max_tokens=90, context_shift=True, **ANSWER)
    assert found.ids == wanted and found.finish_reason == "length"
    assert len(model.generate(TEXT, max_tokens=90, **ANSWER).ids) == CONTEXT - len(TEXT) + 1
    assert len(model.generate(TEXT, max_tokens=None, context_shift=True, **ANSWER).ids) <= CONTEXT
    with numflow.Engine(model) as engine:
        several = [engine.submit(TEXT, max_tokens=90, context_shift=True, speculate=how, **ANSWER)
                   for how in ("off", "ngram", "off")]
        assert [handle.result(60).ids for handle in several] == [wanted] * 3
        drawn = engine.submit(TEXT, max_tokens=70, context_shift=True, temperature=1.0, seed=1, n=2, ignore_eos=True)
        assert [len(one.ids) for one in drawn.results(60)] == [70, 70]
        assert engine.stats["kv_blocks_used"] == 0
        with pytest.raises(RequestError, match="slot 4 has no text"):  # none of it can be gone on from
            engine.submit(TEXT, max_tokens=90, context_shift=True, id_slot=4, **ANSWER).result(60)
            engine.save_session("nowhere", 4)


def test_what_cannot_go_on_is_refused(model):
    for settings, why in (({"num_beams": 2}, "token by token"), ({"context_shift": 1}, "should be true or false")):
        with pytest.raises(RequestError, match=why):
            model.generate(TEXT, **{"context_shift": True, **settings})
