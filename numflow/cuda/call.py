"""What binders make of a step: launches whose grids depend on how many rows a batch has."""

from collections.abc import Callable
from dataclasses import dataclass

from numflow.cuda.device import Launch
from numflow.cuda.kernel import Kernel
from numflow.ops import Step

# Fields of the counts that kernels read on the device (batch.py), and the rows of a buffer that each one counts.
N_TOKENS, N_LOGIT_ROWS, N_ROUTES, N_SEQUENCES = range(4)
ROW_FIELD = {"tokens": N_TOKENS, "logits": N_LOGIT_ROWS, "routes": N_ROUTES}


@dataclass(frozen=True)
class Sizes:
    """How large the grids of a run must be. rows: by field; keys: of the longest sequence.

    In a recorded run these are what there is room for; kernels read the counts of the batch on the device.
    """

    rows: tuple[int, int, int, int]
    keys: int


@dataclass(frozen=True)
class Call:
    """One launch of a bound step: plan(sizes) -> Launch. step: None for what prepares an operand."""

    step: Step | None
    plan: Callable[[Sizes], Launch]


def per_row(step: Step | None, kernel: Kernel, field: int, blocks: int, *args) -> Call:
    """A call on `blocks` blocks for each row that the field counts: grid (blocks, rows)."""
    return Call(step, lambda sizes: Launch(kernel, (blocks, max(sizes.rows[field], 1), 1), args))


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
