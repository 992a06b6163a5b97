"""Constraints: excluded tokens."""

import numpy as np
import pytest

from numflow.decoding.constraints import Constraints

SCORES = np.arange(6, dtype=np.float32)


def banned(limits, before, new):
    """Ids with score -inf; checks that the others keep their scores."""
    scores = limits.apply(SCORES, before, new)
    kept = np.isfinite(scores)
    np.testing.assert_array_equal(scores[kept], SCORES[kept])
    return np.flatnonzero(~kept).tolist()


def test_without_constraints_nothing_changes():
    assert Constraints(frozenset({1}), max_tokens=9).apply(SCORES, [1, 2], 1) is SCORES


@pytest.mark.parametrize(("size", "before", "out"), [
    (1, [3, 4, 3], [3, 4]), (2, [1, 2, 1], [2]), (2, [1, 2, 1, 3, 1], [2, 3]), (2, [1, 1], [1]), (2, [1], []),
    (3, [1, 2, 3, 1, 2], [3]), (3, [1, 2, 3, 2], []), (3, [1, 2], []), (4, [5, 5, 5], []), (4, [5, 5, 5, 5], [5])])
def test_no_sequence_comes_twice(size, before, out):
    assert banned(Constraints(no_repeat_ngram=size, max_tokens=9), before, 0) == out


def test_ends_have_to_wait():
    limits = Constraints(frozenset({1, 4}), min_tokens=2, max_tokens=9)
    assert [banned(limits, [0] * (1 + new), new) for new in range(4)] == [[1, 4], [1, 4], [], []]
    assert banned(Constraints(frozenset({1, 60}), min_tokens=2, banned=((70,),), max_tokens=9), [0], 0) == [1]


def test_banned_sequences():
    limits = Constraints(banned=((2,), (0, 3), (0, 1, 5)), max_tokens=9)
    assert banned(limits, [], 0) == [2]
    assert banned(limits, [0], 0) == [2, 3]
    assert banned(limits, [0, 1], 0) == [2, 5]
    assert banned(limits, [1, 0, 1], 0) == [2, 5]


def test_a_forced_last_token():
    limits = Constraints(frozenset({1}), no_repeat_ngram=1, min_tokens=3, max_tokens=3, forced_last=1)
    assert banned(limits, [0, 5], 1) == [0, 1, 5]
    last = limits.apply(SCORES, [0, 5, 1], 2)
    assert (last[1], np.isfinite(last).sum()) == (0, 1)
    assert SCORES[1] == 1  # what was given is not changed
