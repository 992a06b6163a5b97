"""Error-feedback rounding: less error in a layer's outputs, the compiled version against the plain one, invalid input.
"""

import numpy as np
import pytest

from numflow.errors import FormatError, RequestError
from numflow.quant import decode, encode, find
from numflow.quant.feedback import feedback_reference, prepared, search_with_feedback
from numflow.quant.layout import pack_reference


def layer(rows=48, columns=288, seed=0):
    """Weights, and inputs [T, K] whose columns are correlated and differ in magnitude."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * np.exp(-np.arange(columns) / 40)[:, None]
    inputs = rng.standard_normal((1000, columns)) @ mix + 0.2 * rng.standard_normal((1000, columns))
    inputs *= np.geomspace(1, 30, columns)[rng.permutation(columns)]
    return (rng.standard_normal((rows, columns)) * 0.02).astype(np.float32), inputs


def output_error(x, y, inputs):
    return np.linalg.norm(inputs @ (y - x).T) / np.linalg.norm(inputs @ x.T)


@pytest.mark.parametrize("name, gain", [("q2", 0.5), ("q3h", 0.5), ("q4", 0.5), ("q8", 0.6)])
@pytest.mark.thin(2)
def test_outputs_are_nearer(name, gain):
    scheme, (x, inputs) = find(name), layer()
    half = len(inputs) // 2
    moment, held_out = inputs[:half].T @ inputs[:half], inputs[half:]
    plain, weighted = (decode(encode(x, scheme, c), scheme, 288) for c in (None, np.diagonal(moment)))
    fed = decode(encode(x, scheme, moment=moment), scheme, 288)
    assert output_error(x, fed, held_out) < gain * output_error(x, weighted, held_out)
    assert output_error(x, weighted, held_out) < output_error(x, plain, held_out)


@pytest.mark.parametrize("name", ["q2", "q3", "q3h", "q4", "q6"])
@pytest.mark.thin(3)
def test_the_kernel_rounds_as_the_reference_does(name):
    scheme, (x, inputs) = find(name), layer(rows=35, columns=288)  # not whole tiles, more than one stripe
    x[5] = 0
    fields = search_with_feedback(x, scheme, inputs.T @ inputs, threads=2)
    np.testing.assert_array_equal(fields.codes, feedback_reference(x, scheme, inputs.T @ inputs, fields))
    np.testing.assert_array_equal(encode(x, scheme, moment=inputs.T @ inputs), pack_reference(fields))


def test_independent_inputs_change_nothing_but_importances():
    scheme, (x, _) = find("q4"), layer()
    np.testing.assert_array_equal(encode(x, scheme, moment=np.eye(288) * 7), encode(x, scheme))
    np.testing.assert_array_equal(encode(x, scheme, moment=np.zeros((288, 288))), encode(x, scheme))
    diagonal = np.linspace(1, 2, 288)
    np.testing.assert_array_equal(encode(x, scheme, moment=np.diag(diagonal)), encode(x, scheme, diagonal / 2))


def test_the_factor_inverts_the_damped_moment():
    _, inputs = layer()
    moment = inputs.T @ inputs
    order, upper, importance = prepared(moment, 288, "x")
    assert (np.diff(np.diagonal(moment)[order]) <= 0).all()
    np.testing.assert_allclose(importance, np.diagonal(moment) / np.diagonal(moment).max(), rtol=1e-6)
    assert np.array_equal(upper, np.triu(upper))
    damped = moment + 0.01 * np.diagonal(moment).mean() * np.eye(288)
    np.testing.assert_allclose(upper.astype(float).T @ upper @ damped[np.ix_(order, order)], np.eye(288), atol=1e-4)


def test_bad_moments_are_refused():
    scheme, (x, _) = find("q4"), layer()
    with pytest.raises(RequestError, match="inputs of blk.0 should be .288, 288., is .3, 3."):
        encode(x, scheme, moment=np.eye(3), name="blk.0")
    with pytest.raises(RequestError, match="has NaN, infinities or a negative diagonal"):
        encode(x, scheme, moment=np.full((288, 288), np.nan))
    with pytest.raises(RequestError, match="is no second moment: it has negative directions"):
        encode(x, scheme, moment=np.eye(288) + 5 * np.eye(288)[::-1])
    with pytest.raises(RequestError, match="both importances and a second moment"):
        encode(x, scheme, np.ones(288), np.eye(288))
    with pytest.raises(RequestError, match="uses no calibration"):
        encode(x, find("q3h_b64t1"), moment=np.eye(288))
    x[0, 0] = np.nan
    with pytest.raises(FormatError, match="row 0, column 0 is nan"):
        encode(x, scheme, moment=np.eye(288))
