"""Parameters that kernels of products share (lang/parameters.py), and what a matrix is as one."""

from typing import NamedTuple

from numflow.cuda.device.device import Ref
from numflow.cuda.lang.scalar import f32, i32, u16, u32
from numflow.cuda.weights.layout import Matrix
from numflow.cuda.weights.operand import UNIT
from numflow.cuda.weights.outliers import apart_args
from numflow.cuda.weights.pack import PARTS


class Planes(NamedTuple):
    """The parts of a matrix (weights/layout.py), those that its scheme has; of plain numbers `low` is the matrix."""

    low: u32.ptr
    high: u32.ptr
    two: u32.ptr
    one: u32.ptr
    head: u16.ptr
    above: u32.ptr
    per_row: u32.ptr


class Bias(NamedTuple):
    """Bias of each row's product, if it is present."""

    data: f32.ptr
    present: u32


class Shape(NamedTuple):
    """counts[field] rows of n products; units: of a row of the matrix, or columns of plain numbers with padding."""

    counts: i32.ptr
    field: u32
    n: u32
    units: u32


class Residual(NamedTuple):
    """y = residual + factor * product, if it is present."""

    data: f32.ptr
    stride: u32
    factor: f32
    present: u32


class Ends(NamedTuple):
    """Work of few_gemm.py at a product's end.

    data .. present: a residual, as of Residual. p, q: numbers of an activation; words, scales: the float16 operand that
    it becomes. rows, rows_stride: float32 of an operand that was not scaled, if it is unscaled.
    """

    data: f32.ptr
    stride: u32
    factor: f32
    present: u32
    p: f32
    q: f32
    words: u32.ptr
    scales: f32.ptr
    rows: f32.ptr
    rows_stride: u32
    unscaled: u32


class Late(NamedTuple):
    """A norm that is taken late (unit.py), if it has parts: sums of squares, their number for a row, its eps."""

    squares: f32.ptr
    parts: u32
    eps: f32


ALONE = Residual(None, 0, 1.0, 0)  # nothing is added
NOTHING = Ends(*ALONE, 0.0, 0.0, None, None, None, 0, 0)
AT_ONCE = Late(None, 0, 0.0)  # no norm is late


class Apart(NamedTuple):
    """Outliers kept apart, and the float32 they meet; slots and width: where they are and how many a row has."""

    x: f32.ptr
    x_stride: u32
    slots: u32.ptr
    width: u32


def planes_of(weight: Matrix) -> Planes:
    """The parts of a matrix."""
    return Planes(*(weight.parts.get(name) for name in ("codes" if weight.is_float else PARTS[0], *PARTS[1:])))


def bias_of(bias: Ref | None) -> Bias:
    """A bias, or none."""
    return Bias(bias, int(bias is not None))


def units_of(weight: Matrix) -> int:
    """`units` of Shape."""
    return weight.pitch if weight.is_float else weight.pitch // UNIT


def apart_of(weight: Matrix, x: tuple[Ref | None, int]) -> Apart:
    """A matrix's outliers, if it has any, with the float32 rows x."""
    return Apart(*apart_args(weight, x))
