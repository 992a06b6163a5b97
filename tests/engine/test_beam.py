"""Beam search against an exhaustive search, and its stopping rules."""

import itertools
import math

import numpy as np
import pytest

from numflow.decoding.constraints import Constraints
from numflow.engine.request.beam import Beams, BeamSearch
from numflow.errors import RequestError

V, END = 5, 4


def logits(ids):
    """Random, but the same for the same ids."""
    return np.random.default_rng([7, *ids]).normal(0, 2, V).astype(np.float32)


def log_probabilities(ids):
    row = logits(ids).astype(np.float64)
    return row - math.log(np.exp(row).sum())


def search(beams, constraints, forced=0):
    """The search that has ended, and the number of steps it took."""
    found, steps = BeamSearch(beams, constraints, [0], forced), 0
    while not found.done:
        before = found.running
        parents = found.advance(np.stack([logits(h.ids) for h in before]))
        assert [before[p].ids for p in parents] == [h.ids[:-1] for h in found.running]
        assert len(found.running) <= beams.num_beams
        steps += 1
    return found, steps


def every_text(longest, penalty, forced=0):
    """(score, ids, ended) of every text of at most `longest` tokens, the end token included, best first."""
    texts = []
    for size in range(1, longest + 1):
        for ids in itertools.product(range(V), repeat=size):
            if END in ids[:-1] or (size < longest and ids[-1] != END):
                continue
            score = sum(log_probabilities(ids[:i])[id] for i, id in enumerate(ids)) / (size + forced) ** penalty
            texts.append((score, ids[:-1] if ids[-1] == END else ids, ids[-1] == END))
    return sorted(texts, reverse=True)


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("forced", [0, 1])
def test_enough_beams_find_the_best_texts(penalty, forced):
    best = every_text(4, penalty, forced)
    found, _ = search(Beams(300, penalty), Constraints(frozenset({END}), max_tokens=4), forced)
    assert found.result.score == pytest.approx(best[0][0])
    for hypothesis, (score, ids, ended) in zip(found.finished, best[:200], strict=False):
        assert (hypothesis.ids, hypothesis.ended) == (ids, ended)
        assert hypothesis.score == pytest.approx(score)


def test_one_beam_and_no_end_is_greedy():
    found, steps = search(Beams(1), Constraints(max_tokens=6))
    ids = []
    for _ in range(6):
        ids.append(int(logits(ids).argmax()))
    assert (found.result.ids, found.result.ended, steps) == (tuple(ids), False, 6)


def test_stopping_early():
    steps = {}
    for early in (True, False, "never"):
        found, steps[early] = search(Beams(3, 1.0, early), Constraints(frozenset({END}), max_tokens=40))
        assert len(found.finished) == 3
    assert steps[True] <= steps[False] <= steps["never"]
    assert steps[True] < steps["never"] == 40


def test_an_end_token_below_the_best_beams_is_no_text():
    """Only the first num_beams candidates may end; the others keep the beams going."""
    found = BeamSearch(Beams(2), Constraints(frozenset({END}), max_tokens=9), [0])
    row = np.array([3, 2, 0, 0, 1], np.float32)  # the end token is third
    found.advance(row[None])
    assert (found.finished, [h.ids for h in found.running]) == ([], [(0,), (1,)])
    found = BeamSearch(Beams(2), Constraints(frozenset({END}), max_tokens=9), [0])
    found.advance(row[None][:, [0, 4, 2, 3, 1]])  # now it is second
    assert ([h.ids for h in found.finished], [h.ids for h in found.running]) == ([()], [(0,), (1,)])


def test_several_end_tokens_leave_enough_beams():
    ends = frozenset({2, 3, 4})
    found = BeamSearch(Beams(2), Constraints(ends, max_tokens=9), [0])
    found.advance(np.array([[0, 1, 5, 6, 7]], np.float32))
    assert [h.ids for h in found.running] == [(1,), (0,)]
    assert len(found.finished) == 2


def test_constraints_hold_for_every_beam():
    limits = Constraints(frozenset({END}), no_repeat_ngram=2, min_tokens=5, max_tokens=8)
    found, _ = search(Beams(4), limits)
    for hypothesis in found.finished:
        assert len(hypothesis.ids) >= 5
        pairs = list(itertools.pairwise((0, *hypothesis.ids)))
        assert len(pairs) == len(set(pairs))


def test_no_tokens_wanted():
    found = BeamSearch(Beams(3), Constraints(max_tokens=0), [0])
    assert (found.done, found.result.ids) == (True, ())


def test_what_cannot_be_searched():
    found = BeamSearch(Beams(2), Constraints(max_tokens=3), [0])
    with pytest.raises(RequestError, match="logits are not finite"):
        found.advance(np.array([[1, np.nan]], np.float32))
    found = BeamSearch(Beams(2), Constraints(max_tokens=3, banned=tuple((id,) for id in range(V))), [0])
    with pytest.raises(RequestError, match="no token may come next"):
        found.advance(logits([])[None])


@pytest.mark.parametrize(("settings", "message"), [
    ({"num_beams": 0}, "num_beams should be a whole number from 1, is 0"), ({"num_beams": 2.0}, "num_beams"),
    ({"num_beams": True}, "num_beams"), ({"length_penalty": "1"}, "length_penalty should be a number"),
    ({"length_penalty": math.inf}, "length_penalty"), ({"early_stopping": "always"}, "early_stopping should be True")])
def test_bad_settings(settings, message):
    with pytest.raises(RequestError, match=message):
        Beams(**settings)
