"""Calls that add the products with a matrix's outliers (outliers.py) to the output of the matrix's kernel."""

from typing import Any

from numflow.cpu.linear.slots import EMBED_OUTLIERS, EXPERT_OUTLIERS, OUTLIERS
from numflow.cpu.runtime.kernel import Argument, Call, Code
from numflow.cpu.weights.outliers import PackedOutliers
from numflow.ops import Step

_CODE = Code("numflow.cpu.linear.outliers_kernels")


def _shared_slots(step: Step, ctx, sparse: PackedOutliers, x: Argument) -> dict[str, Any]:
    y = step.outputs[0]
    return {"header": ctx.header, "rows_field": ctx.rows(y), "x": x, "slots": sparse.slots, "starts": sparse.starts,
            **ctx.strided("y", y)}


def added(step: Step, ctx, sparse: PackedOutliers, x: Argument, token_block: int) -> Call:
    """The call for a `linear`; x: its float32 operand.

    No barrier is needed after the matrix's call: each thread has the same tiles in both.
    """
    y = step.outputs[0]
    return Call.named(None, _CODE.kernel("add_outliers"), OUTLIERS, **_shared_slots(step, ctx, sparse, x), rows=y.width,
                      columns=step.inputs[0].width, token_block=token_block, joined=True)


def added_to_experts(step: Step, ctx, sparse: PackedOutliers, x: Argument, experts: int, routes: int,
                     groups: Argument) -> Call:
    """The call for an `expert_linear`; x: the float32 operand of the routes, grouped by expert."""
    y = step.outputs[0]
    return Call.named(None, _CODE.kernel("add_expert_outliers"), EXPERT_OUTLIERS, **_shared_slots(step, ctx, sparse, x),
                      rows=y.width, columns=step.inputs[0].width, token_block=0, experts=experts, capacity=routes,
                      groups=groups, joined=True)


def added_to_heads(step: Step, ctx, sparse: PackedOutliers, x: Argument, heads: int) -> Call:
    """The call for a `head_linear`; x: the float32 operand, head after head."""
    x_view, y = step.inputs[0], step.outputs[0]
    return Call.named(None, _CODE.kernel("add_expert_outliers"), EXPERT_OUTLIERS, **_shared_slots(step, ctx, sparse, x),
                      rows=y.width // heads, columns=x_view.width // heads, token_block=0, experts=heads, capacity=0,
                      groups=0, joined=True)


def added_to_rows(sparse: PackedOutliers, shared: dict[str, Any]) -> Call:
    """The call for an `embed` or `embed_ids`; shared: arguments that both kernels have."""
    return Call.named(None, _CODE.kernel("add_outliers_of_rows"), EMBED_OUTLIERS, **shared, slots=sparse.slots,
                      starts=sparse.starts, joined=True)
