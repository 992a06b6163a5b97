"""Micro-batches: every row is in exactly one, with its sequence, and results are bit-identical."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numflow.ops import Batch
from numflow.partition.run import micro
from numflow.partition.run.micro import cut_batch, pieces_of
from tests.partition.plans import model_of, one_device, placed
from tests.specs.case import run


def test_how_many():
    assert [pieces_of(rows, 2) for rows in (1, 127, 128, 256, 512)] == [1, 1, 2, 4, 4]
    assert pieces_of(512, 1) == 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_every_row_is_in_one(lengths, pieces, data):
    rows = sum(lengths)
    if not rows:
        return
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    wanted = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), np.int32)
    of = np.repeat(np.arange(len(lengths)), lengths)
    batch = Batch(np.arange(rows, dtype=np.int32), np.arange(rows, dtype=np.int32) - starts[of], starts,
                  np.arange(len(lengths), dtype=np.int32)[:, None], wanted, types=np.arange(rows, dtype=np.int32),
                  cross_lengths=np.arange(len(lengths), dtype=np.int32))
    seen, found = [], {}
    for piece, which in cut_batch(batch, pieces):
        assert piece.starts[0] == 0 and piece.starts[-1] == len(piece.tokens) and (np.diff(piece.starts) > 0).all()
        assert len(piece.blocks) == len(piece.starts) - 1 == len(piece.cross_lengths)
        assert piece.slots.tolist() == piece.blocks[:, 0].tolist()  # none were given: sequence b is in slot b
        sequence = np.repeat(piece.blocks[:, 0], np.diff(piece.starts))
        np.testing.assert_array_equal(sequence, of[piece.tokens])
        np.testing.assert_array_equal(piece.positions, batch.positions[piece.tokens])
        seen += piece.tokens.tolist()
        found |= dict(zip(which.tolist(), piece.tokens[piece.logit_rows].tolist(), strict=True))
    assert seen == list(range(rows))
    assert [found[i] for i in range(len(wanted))] == wanted.tolist()


@pytest.mark.parametrize("name", ["qwen3", "lfm2", "m2m100", "bert"])
def test_the_same_bits(name, monkeypatch):
    monkeypatch.setattr(micro, "ROWS", 3)
    built, checkpoint, given = model_of(name)
    expected = one_device(built, checkpoint, "cpu", **given)
    program = placed(built, checkpoint, "cpu", "0;1")
    ran = []
    many = program.run_many
    monkeypatch.setattr(program, "run_many", lambda batches, *rest: ran.append(len(batches)) or many(batches, *rest))
    np.testing.assert_array_equal(run(program, output="logits", **given), expected)
    assert ran[-1] == (1 if name == "bert" else min(4, len(given["ids"]) // 3))  # an encoder sees all rows at once
    program.close()
