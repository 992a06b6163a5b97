"""Streamed text: stop strings and incomplete characters are held back, cut off and flushed."""

import itertools

import pytest

from numflow.engine.run.generation import Piece, TextStream
from tests.engine.fake import EOS, FakeTokenizer, fake_model, writes


def stream(text, *stops):
    pieces = TextStream(FakeTokenizer().stream(), stops)
    out = []
    for byte in text.encode():
        out.append(pieces.push(byte))
        if pieces.stopped:
            break
    return [*out, pieces.flush()], pieces.stopped


def test_pieces_of_ascii_come_at_once():
    assert stream("abc") == (["a", "b", "c", ""], False)


@pytest.mark.parametrize("text", ["héllo", "日本語", "👩‍👩‍👧 family", "🏳️‍🌈", "שלום", "e\u0301"])
def test_characters_are_never_cut(text):
    pieces, _ = stream(text)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_an_incomplete_character_at_the_end_is_flushed():
    pieces = TextStream(FakeTokenizer().stream())
    assert [pieces.push(byte) for byte in "é".encode()[:1]] == [""]
    assert pieces.flush() == "\ufffd"


def test_what_may_become_a_stop_string_is_held_back():
    assert stream("abENX", "END") == (["a", "b", "", "", "ENX", ""], False)
    assert stream("abEND more", "END") == (["a", "b", "", "", "", ""], True)
    assert stream("abEN", "END") == (["a", "b", "", "", "EN"], False)
    assert stream("EEND", "END") == (["", "E", "", "", ""], True)


def test_the_earliest_of_several_stop_strings_wins():
    assert "".join(stream("one. two\nthree", "\n", ".")[0]) == "one"
    assert "".join(stream("abcabd", "abd", "bx")[0]) == "abc"


@pytest.mark.parametrize("stops", [("aab",), ("abab", "ba"), ("b",), ("aaaa", "abb")])
def test_stop_strings_against_plain_search(stops):
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        ends = [text.index(s) + len(s) for s in stops if s in text]
        if ends:  # the first complete stop string ends it; of those complete at once, the longest is cut
            seen = text[: min(ends)]
            text = seen[: min(seen.index(s) for s in stops if s in seen)]
        pieces, stopped = stream("".join(letters), *stops)
        assert ("".join(pieces), stopped) == (text, bool(ends))


def test_streamed_pieces_are_the_text():
    model = fake_model(writes("Ünï👍, STOP here".encode()))
    whole = model.generate([1], max_tokens=40, stop="STOP")
    run = model.generate([1], max_tokens=40, stop="STOP", stream=True)
    pieces = list(run)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(pieces) == whole.text == run.result.text == "Ünï👍, "
    assert [piece.id for piece in pieces if piece.id is not None] == whole.ids == run.result.ids
    assert whole.finish_reason == run.result.finish_reason == "stop_string"


def test_stats_add_up():
    result = fake_model(writes(b"abcd")).generate([1], max_tokens=3)
    assert result.stats["prompt_tokens"] == 1
    assert result.stats["new_tokens"] == 3
    assert result.stats["decode_tok_s"] == pytest.approx(2 / result.stats["decode_s"])
    assert result.stats["prefill_tok_s"] == pytest.approx(1 / result.stats["prefill_s"])


def test_end_of_text_in_the_middle_flushes_what_was_held():
    result = fake_model(writes([*b"a EN", EOS])).generate([1], stop="END")
    assert (result.text, result.finish_reason, result.ids) == ("a EN", "stop", list(b"a EN"))
