"""`bench --op`: the time of one op, its spread, its share of the roofline limit, and the previous run beside it."""

import json

import numpy as np
import pytest

from numflow.cpu.measure import roofline
from numflow.errors import FormatError, RequestError
from numflow.formats.types import TYPES, to_f32
from numflow.lab.op_bench import bench_op
from numflow.lab.random_rows import random_rows
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.layout import ROW_SCHEMES
from numflow.quant.stored import STORED


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path))
    limits = roofline.Roofline(1, 10.0, 200.0, 50.0, 100.0)
    monkeypatch.setattr(roofline, "measure_limits", lambda threads: limits)
    monkeypatch.setattr("numflow.lab.op_bench.MOST_BYTES", 1 << 16)


def test_a_product(tmp_path):
    first = bench_op("linear", "q4", "64x128", 2, repeat=3, threads=1)
    us = first["microseconds"]
    assert us["min"] <= us["median"] <= us["max"] and len(us["samples"]) == 3 and us["min"] > 0
    assert first["operations"] == 2 * 64 * 128 * 2 and first["last"] is None and first["copies"] > 2
    moved = first["megabytes"] * 1e6
    assert 64 * 128 / 2 < moved < 64 * 128 and first["gb_s"] == pytest.approx(moved / us["median"] / 1e3)
    least = max(moved / 10.0, first["operations"] / 200.0) / 1e3
    assert first["at_limit"] == pytest.approx(least / us["median"])
    again = bench_op("linear", "q4", "64x128", 2, repeat=3, threads=1)
    assert again["last"]["microseconds"] == us
    assert again["against_last"] == pytest.approx(us["median"] / again["microseconds"]["median"])
    (kept,) = (tmp_path / "bench").iterdir()
    assert json.loads(kept.read_text())["microseconds"] == again["microseconds"]
    assert bench_op("linear", "q4", "64x128", 1, repeat=3, threads=1)["last"] is None  # another number of tokens


@pytest.mark.parametrize(("kind", "activations", "peak"), [
    ("F16", "f32", 50.0), *(pytest.param(*more, marks=pytest.mark.merge)
                            for more in (("F16", "bf16", 100.0), ("q4", "bf16", 200.0)))])
def test_the_limit_is_that_of_the_arithmetic(kind, activations, peak):
    found = bench_op("linear", kind, "32x64", 64, repeat=1, threads=1, activations=activations)
    least = max(found["megabytes"] * 1e6 / 10.0, found["operations"] / peak) / 1e3
    assert found["at_limit"] == pytest.approx(least / found["microseconds"]["median"])


def test_a_norm_and_a_broken_memory_of_the_last_run(tmp_path):
    bench_op("rms_norm", "q4", "64", 3, repeat=3, threads=1)
    (kept,) = (tmp_path / "bench").iterdir()
    kept.write_text("{")
    assert bench_op("rms_norm", "q4", "64", 3, repeat=3, threads=1)["last"] is None


@pytest.mark.parametrize(("op", "kind", "shape", "tokens", "line"), [
    ("liner", "q4", "64x64", 1, "did you mean 'linear'"), ("linear", "q4", "64", 1, "--shape should be OUTPUTSxINPUTS"),
    ("linear", "q4", "0x64", 1, "--shape should be"), ("linear", "q4", "99999x99999", 1, "has more than"),
    ("linear", "q4", "64x64", 0, "--tokens should be"), ("rms_norm", "q4", "64x64", 1, "the width")])
def test_what_cannot_be_is_one_line(op, kind, shape, tokens, line):
    with pytest.raises(RequestError, match=line):
        bench_op(op, kind, shape, tokens)


def test_a_type_that_is_not_known():
    with pytest.raises(FormatError, match="q4x"):
        bench_op("linear", "q4x", "64x64", 1)


@pytest.mark.parametrize("kind", ["Q4_K", "IQ2_XS", "NVFP4", "I4_BF16_32", "E2M1_ROW"])
@pytest.mark.merge
def test_types_that_are_drawn_as_they_are_stored(kind):
    assert bench_op("linear", kind, "16x256", 1, repeat=2, threads=1)["type"] == kind


def test_rows_that_are_no_whole_blocks():
    with pytest.raises(FormatError, match="rows of 64 weights: Q4_K has blocks of 256"):
        bench_op("linear", "Q4_K", "16x64", 1)


@pytest.mark.parametrize("kind", [
    kind for kind in STORED if TYPES[kind].block > 1 and kind not in {*ROW_SCHEMES, *INFERFLOW_SCHEMES}])
@pytest.mark.thin(8)
def test_random_rows_are_small_numbers(kind):
    columns = 512
    found = to_f32(random_rows(kind, 4, columns), kind)
    assert found.shape == (4, columns) and np.isfinite(found).all() and 1e-6 < np.abs(found).max() < 10
