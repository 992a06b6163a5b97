"""Calls that add a matrix's outliers (outliers.py) to what its kernel has written."""

import numpy as np

from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.weights.outliers import PackedOutliers
from numflow.ops import Step

_CODE = Code("numflow.cpu.linear.outliers_kernels")


def added(step: Step, ctx, sparse: PackedOutliers, x: int, token_block: int) -> Call:
    """To the output of a `linear`; x: address of its float32 operand.

    It goes on without a barrier after the matrix's call: threads have the same tiles in both.
    """
    y = step.outputs[0]
    return Call.of(None, _CODE.kernel("add_outliers"), ctx.header, ctx.rows(y), x, sparse.slots, sparse.starts,
                   *ctx.view(y), y.width, step.inputs[0].width, token_block, joined=True)


def added_to_experts(step: Step, ctx, sparse: PackedOutliers, x: np.ndarray, experts: int, routes: int,
                     groups: np.ndarray) -> Call:
    """The same for an `expert_linear`; x: the float32 operand of the routes by expert."""
    y = step.outputs[0]
    return Call.of(None, _CODE.kernel("add_expert_outliers"), ctx.header, ctx.rows(y), x, sparse.slots, sparse.starts,
                   *ctx.view(y), y.width, step.inputs[0].width, 0, experts, routes, groups, joined=True)


def added_to_heads(step: Step, ctx, sparse: PackedOutliers, x: np.ndarray, heads: int) -> Call:
    """The same for a `head_linear`; x: the float32 operand of one head after the other."""
    x_view, y = step.inputs[0], step.outputs[0]
    return Call.of(None, _CODE.kernel("add_expert_outliers"), ctx.header, ctx.rows(y), x, sparse.slots, sparse.starts,
                   *ctx.view(y), y.width // heads, x_view.width // heads, 0, heads, 0, 0, joined=True)


def added_to_rows(step: Step, ctx, sparse: PackedOutliers, rows: int, factor: float, first: int) -> Call:
    """The same for an `embed` of a table of so many rows, the first of which is row `first` of the whole one."""
    y = step.outputs[0]
    return Call.of(None, _CODE.kernel("add_outliers_of_rows"), ctx.header, ctx.rows(y), sparse.slots, sparse.starts,
                   rows, *ctx.view(y), factor, first, joined=True)
