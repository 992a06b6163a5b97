"""The sentences of experiments follow from their results; implausible results are found."""

import importlib

import pytest

from numflow.lab import Lab
from numflow.lab.harness import _load
from tests.conftest import REPO


@pytest.fixture
def lab(tmp_path):
    return Lab("an-experiment", "An experiment", False, tmp_path, {"rounds": 3})


def module(name, part):
    return importlib.import_module(f"{_load(REPO / 'experiments' / name / 'run.py').__name__}.{part}")


def _load_row(load, times):
    return {"load": load, "samples": [{"first_s": time} for time in times]}


def test_waiting_does_not_shrink_as_the_load_grows():
    show = module("batching", "show")
    assert show.may_follow(_load_row(0.3, (1.0, 1.2)), _load_row(0.6, (1.1, 1.3)), "first_s")
    assert show.may_follow(_load_row(0.3, (1.0, 1.4)), _load_row(0.6, (0.9, 1.1)), "first_s")  # noise
    assert not show.may_follow(_load_row(0.6, (1.0, 1.2)), _load_row(0.9, (0.4, 0.9)), "first_s")


@pytest.mark.parametrize(("q3h", "q4", "said"), [
    ((20.0, 1.0, 3.7), (20.0, 1.0, 4.5), "1.22 times as fast"), ((23.4, 1.1, 3.7), (14.6, 0.58, 4.5), "not bound by")])
def test_a_ratio_above_that_of_the_bytes_is_explained(lab, q3h, q4, said):
    rows = [{"decode_gb_s": speed, "decode_fraction": share, "bits_per_weight": bits,
             "decode_gweights_s": speed * 8 / bits} for speed, share, bits in (q3h, q4)]
    module("quant-error", "speeds").compared(lab, *rows)
    assert said in lab._body[0]


def test_where_hybrid_wins(lab):
    rates = {"by layer": (1, 2, 3), "by tensor": (5, 6, 6), "hybrid": (3, 5, 9)}
    points = {name: [(at, rate) for at, rate in zip((1, 8, 64), own)] for name, own in rates.items()}
    module("partition", "sweeps").leaders(lab, {"queries at the same time": points})
    text = " ".join(lab._body)
    assert "Fastest by queries at the same time: by tensor at 1 to 8, hybrid at 64." in text
    assert "hybrid is the fastest from 64 queries on" in text
    lab._body.clear()
    points["hybrid"][2] = 64, 5
    module("partition", "sweeps").leaders(lab, {"queries at the same time": points})
    assert "hybrid is the fastest of the three at no queries" in " ".join(lab._body)


def test_guesses_that_pass_are_counted(lab):
    show = module("speculative", "show")
    rows = [{"draft": "a", "prompt": "p", "temperature": t, "accepted": right, "drafts": 10, "speedup": speed,
             "cost": 0.5} for t, right, speed in ((0.0, 5, 0.9), (0.8, 4, 1.1))]
    show.drafts_said(lab, rows)
    text = " ".join(lab._body)
    assert "in 0 of 1 pairs" in text and "1 of 2 runs" in text and "40% to 40% of them are accepted" in text


def test_trained_drafts_that_pay_are_counted(lab):
    show = module("speculative", "show_trained")
    rows = [{"draft": "a", "temperature": t, "guesses": count, "accepted": 6, "drafts": 10, "tokens_per_step": 1.8,
             "read": 0.2, "speedup": speed, "low": speed - 0.1}
            for t, count, speed in ((0.0, 1, 0.9), (0.0, 3, 1.05), (0.8, 1, 1.3))]
    show.said(lab, rows)
    assert lab._body[0] == "Of single greedy drafts 60% of a's are right."
    assert "1 of 3 settings are faster than without drafts in every round, at best 1.30 times." in lab._body
    assert show.computed(rows[0], "read") == pytest.approx(1.5) and show.computed(rows[1], "read") == 1.125


@pytest.mark.parametrize(("change", "doubt", "said"), [
    ({}, "", "No answer was lost"), ({"lost": 2}, "2 answers lost", "2 answers were lost"),
    ({"blocks_at_end": 3}, "3 blocks", "3 blocks were in use"),
    ({"samples": [[24.0, 1e9, 200, 1], [50.0, 1.2e9, 200, 0]]}, "", "Memory GREW by 20.0%"),
    ({"recovered_s": None}, "no health", "was not healthy again")])
@pytest.mark.thin(3)
def test_what_a_soak_found(lab, change, doubt, said):
    pytest.importorskip("matplotlib")
    found = {"samples": [[24.0, 1e9, 200, 1], [50.0, 1e9, 503, 0]], "killed_s": 30.0, "recovered_s": 34.0,
             "counts": [], "minutes": 1, "clients": 2, "lost": 0, "blocks_at_end": 0}
    module("serving", "soak").report(lab, found | change)
    assert said in " ".join(lab._body)
    assert doubt in " ".join(lab.doubts) and bool(doubt) == bool(lab.doubts)
