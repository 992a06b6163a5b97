"""Spans of a cut: they are consecutive, proportional to the shares, and keep query heads with their key/value heads."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numflow.partition.cut.spans import (
    even_spans,
    head_spans,
    holders,
    is_aligned,
    kv_spans,
    layer_spans,
    nearest_spans,
    scaled,
)

SHARES = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=5).map(tuple)


def _follow(spans, total):
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(spans))


@given(st.integers(1, 500), SHARES, st.sampled_from([1, 16, 32, 256]))
def test_even_spans(total, shares, unit):
    spans = even_spans(total, shares, unit)
    _follow(spans, total)
    assert all(begin % unit == 0 or begin == total for begin, _ in spans)


@given(st.integers(1, 80), SHARES)
def test_layers(total, shares):
    if total < len(shares):
        return
    spans = layer_spans(total, shares)
    _follow(spans, total)
    assert len(holders(spans)) == len(shares)
    if total >= 20 * len(shares):
        for (begin, end), share in zip(spans, shares, strict=True):
            assert (end - begin) / total == pytest.approx(share / sum(shares), abs=0.08)


def test_borders_move_to_the_nearest_place_that_is_open():
    assert nearest_spans(((0, 3), (3, 6), (6, 9)), ()) == ((0, 3), (3, 6), (6, 9))
    assert nearest_spans(((0, 3), (3, 6), (6, 9)), {3, 6, 7}) == ((0, 2), (2, 5), (5, 9))
    assert nearest_spans(((0, 2), (2, 3), (3, 4)), {2}) == ((0, 1), (1, 3), (3, 4))
    assert nearest_spans(((0, 1), (1, 2)), {1}) == ((0, 1), (1, 2))  # there is no other


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 6), SHARES)
def test_heads_find_their_keys(kv_heads, group, shares):
    heads = kv_heads * group
    spans = head_spans(heads, kv_heads, shares)
    _follow(spans, heads)
    for (begin, end), (first, last) in zip(spans, kv_spans(spans, heads, kv_heads), strict=True):
        if begin == end:
            continue
        local, keys = end - begin, last - first
        assert local % keys == 0
        assert [first + h // (local // keys) for h in range(local)] == [h // group for h in range(begin, end)]


@pytest.mark.parametrize(("heads", "kv_heads", "shares", "expected"), [
    (32, 8, (1, 1), ((0, 16), (16, 32))),
    (9, 3, (1, 1), ((0, 6), (6, 9))),             # whole groups only
    (8, 1, (1, 1, 1), ((0, 3), (3, 6), (6, 8))),  # one key for all: any cut
    (4, 2, (1, 1, 1, 1), ((0, 1), (1, 2), (2, 3), (3, 4))),  # a key on two devices
    (4, 4, (2, 1), ((0, 3), (3, 4))),
    (2, 2, (1, 1, 1), ((0, 0), (0, 1), (1, 2))),  # somebody has nothing
])
def test_cuts_of_heads(heads, kv_heads, shares, expected):
    assert sorted(e - b for b, e in head_spans(heads, kv_heads, shares)) == sorted(e - b for b, e in expected)


def test_blocks_of_the_output_projection():
    assert is_aligned(head_spans(32, 32, (1.0, 1.0, 1.0), 4), 4)
    assert max(end - begin for begin, end in head_spans(32, 32, (1.0, 1.0, 1.0), 4)) == 12
    assert scaled(((0, 2), (2, 3)), 64) == ((0, 128), (128, 192))
