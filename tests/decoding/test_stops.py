"""Length of the suffix that is held back as a possible start of a stop string."""

import pytest

from numflow.decoding.stops import held_back


@pytest.mark.parametrize("text, marks, expected", [
    ("a", (), 0), ("", ("end",), 0), ("one e", ("end",), 1), ("one en", ("end", "n"), 2), ("one end", ("end",), 0),
    ("abab", ("ababc",), 4), ("xabab", ("abac", "babz"), 3), ("aa", ("a",), 0), ("a\n", ("\n\nUser", "\nBot"), 1)])
def test_longest_end_that_may_begin_a_mark(text, marks, expected):
    assert held_back(text, marks) == expected
