"""Lab 8: GPTQ.

GPTQ rounds the columns of a weight matrix one after another. The error of each column is compensated by the columns
that are not rounded yet. The goal is not a small error of the weights but a small error of the outputs: the sum of
(w' - w) M (w' - w)^T over the rows of w, with M = E[a a^T], the second moment of the inputs a of the matrix.

`order, upper, importances = prepared(moment, K, "matrix")` (given) returns an order of the K columns, int64 [K], with
the largest inputs first, and the upper triangular matrix U [K, K] with U^T U = M^-1 for the columns in that order. (The
importances are not needed here; "matrix" is a name for error messages.) For j = 0, 1, 2, ... in this order:

    code_j = the nearest code of w_j, with the scale and the zero of its block
    e_j = (w_j - decoded_j) / U[j, j]            decoded = scale * (code - zero)
    w_k = w_k - e_j * U[j, k]                    for all later columns k > j

The scales and zeros of the blocks of `scheme.block` columns are given and do not change: fields.scales_and_zeros()
returns both, float32 [N, K / block]. A scale of 0 means a block of zeros, whose codes are 0. Codes are
0 .. scheme.levels - 1.

    numflow learn check 8        numflow learn hint 8        numflow learn bench 8
"""

import numpy as np

from numflow.quant.feedback import prepared

LAB = {
    "number": 8, "title": "GPTQ", "minutes": 60, "functions": ["feedback"], "grader": "own", "needs": [6],
    "hints": [
        "Take two columns whose inputs are always equal: a = (t, t). The first weight is rounded up by 0.3. How should "
        "the second weight change, so that the output stays the same?",
        "The hard part is the order: w = x[:, order] has the columns in rounding order, their scales and zeros are "
        "those of block order // scheme.block, and codes are written back to column order[j].",
        "for j, column in enumerate(order): code = clip(floor(w[:, j] / scale + zero + 0.5), 0, levels - 1); error = "
        "(w[:, j] - scale * (code - zero)) / upper[j, j]; w[:, j + 1:] -= error[:, None] * upper[j, j + 1:]."],
}


def feedback(x, scheme, moment, fields):
    """Weights x f32 [N, K], moment [K, K], fields with scales and zeros -> codes u8 [N, K]."""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper)


def _feedback(x, scheme, fields, order, upper, sign=1.0, divided=True, reach=None, codes_only=False,
              blocks=None, columns=None, zero_sign=1):
    blocks = (order if blocks is None else blocks) // scheme.block
    scales, zeros = (part[:, blocks] for part in fields.scales_and_zeros())
    w, codes = x[:, order if columns is None else columns], np.zeros(x.shape, np.uint8)
    for j, column in enumerate(order):
        scale, zero = np.where(scales[:, j] > 0, scales[:, j], np.float32(1)), zeros[:, j]
        code = np.clip(np.floor(w[:, j] / scale + np.float32(zero_sign) * zero + np.float32(0.5)), 0, scheme.levels - 1)
        error = w[:, j] / scale - (code - zero) if codes_only else w[:, j] - scale * (code - zero)
        error = np.float32(sign) * (error / upper[j, j] if divided else error)
        end = None if reach is None else j + 1 + reach
        w[:, j + 1:end] -= error[:, None] * upper[j, j + 1:end]
        codes[:, column] = np.where(scales[:, j] > 0, code, 0)
    return codes


def feedback__nearest(x, scheme, moment, fields):
    """plain rounding: errors are not compensated by later columns"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, reach=0)


def feedback__wrong_way(x, scheme, moment, fields):
    """errors that are added to later columns instead of subtracted"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, sign=-1.0)


def feedback__not_divided(x, scheme, moment, fields):
    """errors that are not divided by U[j, j]"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, divided=False)


def feedback__block_of_index(x, scheme, moment, fields):
    """the scale of block j // scheme.block: position j is column order[j], in block order[j] // scheme.block"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, blocks=np.arange(x.shape[1]))


def feedback__not_sorted(x, scheme, moment, fields):
    """weights that are not in the order of U, while codes and scales are"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, columns=np.arange(x.shape[1]))


def feedback__next_alone(x, scheme, moment, fields):
    """an error that only the next column compensates: change all later columns"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, reach=1)


def feedback__in_codes(x, scheme, moment, fields):
    """errors of the codes instead of the weights: multiply them by the scale"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, codes_only=True)


def feedback__natural_order(x, scheme, moment, fields):
    """columns in the order of x with a U for the other order"""
    _, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, np.arange(x.shape[1]), upper)


def feedback__left_in_order(x, scheme, moment, fields):
    """codes that are left in rounding order: position j is column order[j] of x"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper)[:, order]


def feedback__in_block(x, scheme, moment, fields):
    """errors that only the same 32 positions of the order compensate: change all later columns"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    blocks = np.arange(len(order)) // scheme.block
    return _feedback(x, scheme, fields, order, upper * (blocks[:, None] == blocks))


def feedback__zero_subtracted(x, scheme, moment, fields):
    """a zero that is subtracted instead of added: code = w / scale + zero"""
    order, upper, _ = prepared(moment, x.shape[1], "matrix")
    return _feedback(x, scheme, fields, order, upper, zero_sign=-1)


def grade(functions):
    """Grade by the error of the outputs, compared with numflow's own, on correlated inputs."""
    from numflow.learn.graders.calls import Call, grade_calls
    from numflow.learn.graders.quantised import feedback_case

    calls = []
    for name, seed in (("q3h", 1), ("q2", 2), ("q4", 3)):
        arguments, judge = feedback_case(name, seed)
        calls.append(Call(f"{name}-4x96", "feedback", arguments, judge=judge))
    arguments, judge = feedback_case("q3h", 4, zeros=True)
    calls.append(Call("a-block-of-zeros", "feedback", arguments, judge=judge))
    return grade_calls(functions, calls)


def story(functions, model):
    """Text of a model in 2 bits, without and with error feedback."""
    from numflow.learn.graders.stories import with_feedback

    return with_feedback(model, functions["feedback"])


def bench(functions):
    """Errors of outputs by the nearest codes and by yours."""
    from numflow.learn.graders.quantised import feedback_case, output_error

    bars = []
    for name in ("q2", "q3", "q3h", "q4"):
        (x, scheme, moment, fields), _ = feedback_case(name, 5)
        yours = functions["feedback"](x.copy(), scheme, moment, fields)
        for label, codes in (("nearest", fields.codes), ("yours", yours)):
            bars.append((f"{name}, {label}", 100 * output_error(x, moment, fields, codes)))
    return {"what": "error of outputs, relative", "unit": "%", "bars": bars}
