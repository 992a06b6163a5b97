"""Walk of a token: values of steps, the most probable tokens, and the logit lens."""

import numpy as np
import pytest

import numflow
from numflow.errors import RequestError
from tests.server.tiny import write_chat_model

PROMPT = "hello there"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("walk") / "model")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(request, folder):
    with numflow.load(folder, backend=request.param, threads=1) as loaded:
        yield loaded


def test_it_ends_with_the_logits_of_the_prompt(model):
    walk = model.walk(PROMPT, chat=True, lens=True)
    asked = model.request(PROMPT, {"max_tokens": 1, "chat": True}).prefix
    assert walk.template and [id for id, _ in walk.ids] == list(asked)
    assert "".join(text for _, text in walk.ids) == walk.text
    logits = model.logits(asked)[-1]
    last = walk.values[len(walk.rows) - 1]
    assert (last.least, last.most) == pytest.approx((logits.min(), logits.max()), rel=1e-5) and last.finite
    assert [guess.id for guess in walk.best] == np.argsort(-logits, kind="stable")[:5].tolist()
    p = np.exp(logits.astype(np.float64) - logits.max())
    assert walk.best[0].probability == pytest.approx(p.max() / p.sum(), rel=1e-4)
    layers = {row.label.split(".")[1] for row in walk.rows if row.label.startswith("blk.")}
    assert len(walk.lens) == len(walk.stream) == len(layers)
    assert walk.lens[-1] == walk.best and walk.lens[0] != walk.best
    assert not model.walk(PROMPT).template and model.walk(PROMPT).lens == []
    assert model.runner.blocks.used == 0


def test_both_executors_meet_the_same_values(folder):
    with numflow.load(folder, backend="reference") as one, numflow.load(folder, backend="cpu", threads=1) as other:
        true, found = one.walk(PROMPT), other.walk(PROMPT)
    silent = {row.index for row in true.rows if row.op == "cache_write"}
    assert true.values.keys() | silent == {row.index for row in true.rows} and len(true.values) > len(found.values)
    for row in found.rows:
        if row.index in silent:
            continue
        if row.index not in found.values:  # never in memory: another step of the same group has the result
            assert row.within is not None or any(r.within == row.index for r in found.rows)
            continue
        a, b = true.values[row.index], found.values[row.index]
        assert (b.least, b.most, b.rms) == pytest.approx((a.least, a.most, a.rms), rel=1e-3, abs=1e-4), row.label


def test_a_backend_without_values_says_so(folder):
    with numflow.load(folder, backend="reference", devices="0;1") as several:
        walk = several.walk(PROMPT)
        assert walk.rows and walk.values == {} and walk.best == []
        with pytest.raises(RequestError, match="this backend shows no values"):
            several.walk(PROMPT, lens=True)
