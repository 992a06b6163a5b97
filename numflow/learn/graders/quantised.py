"""Cases of quantised matrices, and judges by the quantisation error."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from numflow.learn.cases.verdict import Wrong
from numflow.learn.graders.calls import array
from numflow.learn.graders.header_faults import fault, squares
from numflow.quant.feedback import feedback_reference, prepared
from numflow.quant.layout import ROW_SCHEMES, Fields
from numflow.quant.search import search_reference

AS_GOOD = 1.02  # allowed error, relative to numflow's: float rounding may change a code
KINDS = ("normal", "laplace", "one-outlier", "all-positive", "zeros")  # kinds of rows


@cache
def feedback_case(name: str, seed: int, zeros: bool = False) -> tuple[tuple, Callable[[Any], str]]:
    """Arguments for error feedback on 4 rows of 96 columns with correlated inputs, and the judge of its codes."""
    rng = np.random.default_rng(seed)
    scheme = ROW_SCHEMES[name]
    x = rng.standard_normal((4, 96)).astype(np.float32)
    if zeros:
        x[:, 32:64] = 0
    inputs = rng.standard_normal((300, 24)) @ rng.standard_normal((24, 96)) + 0.3 * rng.standard_normal((300, 96))
    inputs *= rng.uniform(0.3, 3, 96)
    moment = inputs.T @ inputs / len(inputs)
    importance = (np.diagonal(moment) / np.diagonal(moment).max()).astype(np.float32)[None]
    fields = search_reference(x, scheme, importance, False, "x")
    expected = feedback_reference(x.copy(), scheme, moment, fields)
    least = output_error(x, moment, fields, expected)
    order = prepared(moment, x.shape[1], "matrix")[0]

    def judge(found: Any) -> str:
        codes = array(found, expected, "feedback returns codes ")
        if codes.max() >= scheme.levels or codes.min() < 0:
            return f"codes up to {int(codes.max())}, but the codes of {name} are 0 .. {scheme.levels - 1}"
        error = output_error(x, moment, fields, codes)
        if error <= AS_GOOD * least:
            return ""
        position = int(np.argmax((codes != expected).any(axis=0)[order]))
        column = int(order[position])
        row = int(np.argmax(codes[:, column] != expected[:, column]))
        return (f"the error of the outputs is {error:.4g}, {error / least:.2f} times numflow's {least:.4g}; the first "
                f"different code is in row {row}, column {column}, position {position} of the order: got "
                f"{codes[row, column]}, expected {expected[row, column]}")

    return (x, scheme, moment, fields), judge


def output_error(x: np.ndarray, moment: np.ndarray, fields: Fields, codes: np.ndarray) -> float:
    """Relative error of the outputs by codes with the headers of `fields`."""
    off = replace(fields, codes=codes).values().astype(np.float64) - x
    return float(np.sqrt(np.einsum("nk,kl,nl", off, moment, off) / np.einsum("nk,kl,nl", x, moment, x)))


def rows_of(kind: str, columns: int = 128) -> np.ndarray:
    """Four rows of weights of a kind, float32 [4, columns]."""
    rng = np.random.default_rng(len(kind))
    x = rng.laplace(size=(4, columns)) if kind == "laplace" else rng.standard_normal((4, columns))
    if kind == "one-outlier":
        x[:, 17] *= 40
    elif kind == "all-positive":
        x = np.abs(x) + 0.5
    elif kind == "zeros":
        x[:, 32:64], x[1] = 0, 0
    return (0.02 * x).astype(np.float32)


@cache
def searched(kind: str, name: str) -> Fields:
    """The fields of numflow's search for the rows of a kind."""
    x = rows_of(kind)
    return search_reference(x, ROW_SCHEMES[name], np.ones((1, x.shape[1]), np.float32), False, "x")


def row_errors(headers: Callable, kind: str, name: str) -> list[tuple[str, float]]:
    """Bars with the errors of a function and of numflow's search, in percent of the weights."""
    x = rows_of(kind)
    return [(f"{kind}, {label}", 100 * float(np.sqrt(squares(fields, x).sum() / np.square(x, dtype=float).sum())))
            for label, fields in (("yours", headers(x, ROW_SCHEMES[name])), ("numflow", searched(kind, name)))]


def headers_judge(kind: str, name: str) -> Callable[[Any], str]:
    """The judge of Fields for the rows of a kind: shapes, and an error close to the error of numflow's search."""
    x, scheme, reference = rows_of(kind), ROW_SCHEMES[name], searched(kind, name)
    least = squares(reference, x)

    def judge(found: Any) -> str:
        if not isinstance(found, Fields):
            raise Wrong(f"headers should return Fields, but returns {type(found).__name__}")
        for name in ("rows", "blocks", "codes"):
            array(getattr(found, name), getattr(reference, name), f"headers returns {name} ")
        if found.codes.max() >= scheme.levels:
            return f"codes up to {int(found.codes.max())}, but the codes of {scheme.name} are 0 .. {scheme.levels - 1}"
        errors = squares(found, x)
        row = int(np.argmax(errors - AS_GOOD * least))
        if errors[row] <= AS_GOOD * least[row] + 1e-12 or errors.sum() <= AS_GOOD * least.sum():
            return ""
        said = fault(found, reference, x)
        return (f"row {row}: the sum of squared errors is {errors[row]:.4g}, "
                f"{errors[row] / max(least[row], 1e-30):.3g} times numflow's {least[row]:.4g}{said and f'; {said}'}")

    return judge
