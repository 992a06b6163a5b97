"""Sentences on what wrong values have in common (factors, offsets, permutations), and on mistakes in file headers."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.learn.cases.verdict import furthest
from numflow.learn.graders.header_faults import fault
from numflow.learn.graders.quantised import rows_of, searched

X = np.random.default_rng(0).standard_normal((5, 12))


def _head(x):
    y = x.copy()
    y[:, 6:9] *= np.linspace(2, 3, 15).reshape(5, 3)
    return y


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda x: 2 * x, "each of them is 2 times what is expected"),
    (lambda x: -x, "all of them have the wrong sign"),
    (lambda x: x + 0.5, "each of them is +0.5 off"),
    (lambda x: 0 * x, "all of them are 0"),
    (lambda x: x + np.nan, "all of them are NaN"),
    (lambda x: x[:, ::-1], "each row has the right numbers in wrong columns"),
    (lambda x: x[::-1], "each column has the right numbers in wrong rows"),
    (lambda x: x.T.ravel().reshape(x.shape), "the right numbers are in wrong places"),
    (lambda x: x * np.arange(1, 6)[:, None], "each row has the expected values times a different factor, 2 to 5"),
    (lambda x: x * np.arange(2, 14), "each column has the expected values times a different factor, 2 to 13"),
    (_head, "heads 0, 1, 3 are right"),
    (lambda x: np.where(np.arange(5)[:, None] < 3, x, np.sin(9 * x)), "rows 0 to 2 are right"),
    (lambda x: np.where(np.arange(12) == 7, x, np.sin(9 * x)), "column 7 is right"),
    (lambda x: x * np.where(np.arange(12) % 2, 1 - 8e-5, 1 - 3e-5),
     "each of them is nearly right, too small by 3e-05 to 8e-05 of itself"),
    (lambda x: x * 1.0002, "each of them is nearly right, too large by 0.0002 of itself"),
    (lambda x: np.sin(9 * x), "")])
def test_what_wrong_numbers_have_in_common(change, sentence):
    assert furthest(change(X), X, 1e-5, heads=4)["alike"] == sentence


@pytest.mark.parametrize(("factor", "sentence"), [(1.7, ""), (2, "that is 2 times what is expected")])
def test_of_one_wrong_number_a_whole_factor_is_told(factor, sentence):
    y = X.copy()
    y[2, 3] *= factor
    assert furthest(y, X, 1e-5)["alike"] == sentence


@pytest.mark.parametrize("kind", ["normal", "one-outlier"])
@pytest.mark.parametrize(("change", "word"), [
    (lambda f: replace(f, codes=10 - f.codes), "counted from the other end"),
    (lambda f: replace(f, blocks=f.blocks >> 3 | (f.blocks & 7) << 3), "Z in the low bits"),
    (lambda f: replace(f, blocks=f.blocks & 7 | 7 - (f.blocks >> 3) << 3), "counts from the largest zero"),
    (lambda f: replace(f, codes=np.maximum(f.codes, 1) - 1), "the codes are not"),
    (lambda f: replace(f, rows=f.rows + (1 << 7)), "one too large"),
    (lambda f: replace(f, rows=(f.rows >> 7 << 7 | (f.rows & 3) << 5 | f.rows >> 2 & 31).astype(np.uint16)),
     "are swapped"),
    (lambda f: replace(f, rows=np.full_like(f.rows, f.rows[0])), "the header of row 0")])
def test_faults_of_headers(kind, change, word):
    own = searched(kind, "q3h")
    assert word in fault(change(own), own, rows_of(kind))
