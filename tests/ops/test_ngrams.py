"""Hashed n-grams of the reference executor, each computed by itself, and signed square roots."""

import numpy as np

from numflow.ops import Batch, State
from numflow.reference import act, ngrams
from numflow.reference.state import StateMemory


def test_rows_of_ngrams():
    """Each n-gram by itself, in two runs of a text with separators and of one that begins later."""
    text, separator, multipliers, sizes = [3, 9, 0, 4, 9, 9, 5, 6, 7, 1], 9, (5, 7001, 90001), (11, 13, 17, 19)
    memory = StateMemory(State("ngrams", (2,)))
    memory.resize(3)
    memory.array[...] = 7  # of earlier sequences
    found = []
    for first, last in ((0, 4), (4, 10)):
        tokens, counts = np.array(text[first:last] + text[2:4]), np.array([0, last - first, last - first + 2])
        positions = np.array([*range(first, last), 0, 1])
        own = Batch(tokens, positions, counts, np.zeros((2, 1), int), counts[1:] - 1, slots=np.array([2, 0]))
        ids = ngrams.ngram_ids(batch=own, state=memory, multipliers=multipliers, sizes=sizes, separator=separator)
        found += ids[:last - first].tolist()
        assert ids[last - first:].tolist() == [hashes([9, 9, 0]), hashes([9, 0, 4])]
    padded, seen = [separator, separator], []
    for at, token in enumerate(text):
        before = text[:at][-2:]
        reached = before[before.index(separator) + 1:] if separator in before else before
        reached = [] if before[-1:] == [separator] else reached
        seen.append(hashes([*padded, *reached, token][-3:]))
    assert found == seen


def hashes(tokens):
    """Rows of the 2-gram and the 3-gram of three tokens in test_rows_of_ngrams."""
    two = tokens[2] * 5 ^ tokens[1] * 7001
    three = two ^ tokens[0] * 90001
    return [two % 11, 11 + two % 13, 24 + three % 17, 41 + three % 19]


def test_signed_roots():
    x = np.array([[-4.0, 0.0, 9.0, -0.01, 0.01, np.nan]], np.float32)
    np.testing.assert_allclose(act.signed_sqrt(x, least=0.25), [[-2, 0, 3, -0.5, 0.5, np.nan]])
