"""Groups of kernel parameters that the kernels of matrix products share (lang/parameters.py)."""

from typing import NamedTuple

from numflow.cuda.device.device import Ref
from numflow.cuda.lang.scalar import f32, i32, u16, u32
from numflow.cuda.weights.layout import Matrix
from numflow.cuda.weights.operand import UNIT
from numflow.cuda.weights.outliers import apart_args
from numflow.cuda.weights.pack import PARTS


class Planes(NamedTuple):
    """The parts of a matrix (weights/layout.py). Null for parts that its scheme does not have. For a float matrix,
    `low` is the matrix."""

    low: u32.ptr
    high: u32.ptr
    two: u32.ptr
    one: u32.ptr
    head: u16.ptr
    above: u32.ptr
    per_row: u32.ptr


class Bias(NamedTuple):
    """Bias f32 [N], if `present` is not 0."""

    data: f32.ptr
    present: u32


class Shape(NamedTuple):
    """Sizes of a product: counts[field] rows with n results. units: of a row of the matrix; for a float matrix, padded
    columns."""

    counts: i32.ptr
    field: u32
    n: u32
    units: u32


class Residual(NamedTuple):
    """y = residual + factor * product, if `present` is not 0."""

    data: f32.ptr
    stride: u32
    factor: f32
    present: u32


class Ends(NamedTuple):
    """The epilogue of few_gemm.py.

    data .. present: as in Residual. p, q: parameters of an activation. words, scales: the float16 operand to which the
    activation is written. rows, rows_stride: the float32 rows of an operand that was written without a scale, if
    `unscaled` is not 0.
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
    """A norm whose scale the reader applies (unit.py), if `parts` is not 0.

    squares: sums of squares. parts: number of sums for a row. eps: of the norm.
    """

    squares: f32.ptr
    parts: u32
    eps: f32


ALONE = Residual(None, 0, 1.0, 0)  # no residual
NOTHING = Ends(*ALONE, 0.0, 0.0, None, None, None, 0, 0)  # no epilogue
AT_ONCE = Late(None, 0, 0.0)  # no norm to apply


class Apart(NamedTuple):
    """Outliers that are stored apart, and the float32 rows x that they multiply.

    slots: memory of the outliers. width: slots of a row.
    """

    x: f32.ptr
    x_stride: u32
    slots: u32.ptr
    width: u32


def planes_of(weight: Matrix) -> Planes:
    """The parts of a matrix as kernel parameters."""
    return Planes(*(weight.parts.get(name) for name in ("codes" if weight.is_float else PARTS[0], *PARTS[1:])))


def bias_of(bias: Ref | None) -> Bias:
    """A bias as kernel parameters; None: no bias."""
    return Bias(bias, int(bias is not None))


def units_of(weight: Matrix) -> int:
    """The value of Shape.units for a matrix."""
    return weight.pitch if weight.is_float else weight.pitch // UNIT


def apart_of(weight: Matrix, x: tuple[Ref | None, int]) -> Apart:
    """A matrix's outliers, if it has any, with the float32 rows x, as kernel parameters."""
    return Apart(*apart_args(weight, x))
