"""Calls that binders make of a step: launches whose grids depend on the rows of a batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from numflow.cuda.device.device import Launch, Order
from numflow.cuda.lang.kernel import Kernel
from numflow.ops import Step, View

# Fields of the counts that kernels read on the device (batch.py), and the rows of a buffer that each one counts.
N_TOKENS, N_LOGIT_ROWS, N_ROUTES, N_SEQUENCES = range(4)
ROW_FIELD = {"tokens": N_TOKENS, "logits": N_LOGIT_ROWS, "routes": N_ROUTES}


class Sizes(NamedTuple):
    """Sizes that the grids of a run must cover. rows: by field; keys: of the longest sequence.

    In a recorded run these are what there is room for; kernels read the counts of the batch on the device.
    """

    rows: tuple[int, int, int, int]
    keys: int


class Prepared(NamedTuple):
    """Another form of a view's numbers: its kind ("int8", "f16", ...), and the name of the runs that it is made in."""

    view: View
    kind: str
    runs: str


@dataclass(frozen=True)
class Call:
    """One launch of a bound step: plan(sizes) -> Launch (or Order), for runs where `when` holds (None: all).

    step:  None for what prepares an operand.
    makes: what it prepares of a view that the step reads: left out if that is there already, until a step writes the
           view's columns.
    leaves: the same of a view that the step writes, beside the rows or instead.
    """

    step: Step | None
    plan: Callable[[Sizes], Launch | Order]
    when: Callable[[Sizes], bool] | None = None
    makes: Prepared | None = None
    leaves: Prepared | None = None

    def only(self, when: Callable[[Sizes], bool]) -> "Call":
        """The same call, left out of runs of other sizes."""
        before = self.when
        return replace(self, when=when if before is None else lambda sizes: before(sizes) and when(sizes))

    def launches(self, sizes: Sizes) -> list[Launch | Order]:
        """Its launch for a run of these sizes, if there is anything to do."""
        if self.when is not None and not self.when(sizes):
            return []
        launch = self.plan(sizes)
        return [launch] if isinstance(launch, Order) or all(launch.grid) else []


def per_row(step: Step | None, kernel: Kernel, field: int, blocks: int, *args) -> Call:
    """A call on `blocks` blocks for each row that the field counts: grid (rows, blocks); only x may be long."""
    return Call(step, lambda sizes: Launch(kernel, (max(sizes.rows[field], 1), blocks, 1), args))


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
