"""Calls: what a binder returns for a step, kernel launches whose grids depend on the sizes of the batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from numflow.cuda.device.device import Launch, Order
from numflow.cuda.lang.kernel import Kernel
from numflow.ops import Step, View

# Indices into the array `counts` that kernels read on the device (batch.py), and the kind of rows that each one counts.
N_TOKENS, N_LOGIT_ROWS, N_ROUTES, N_SEQUENCES = range(4)
ROW_FIELD = {"tokens": N_TOKENS, "logits": N_LOGIT_ROWS, "routes": N_ROUTES}


class Sizes(NamedTuple):
    """Sizes that the grids of a run must cover. rows: indexed by N_TOKENS, ...; keys: of the longest sequence.

    A CUDA graph is recorded with upper bounds of these sizes; kernels read the actual counts on the device.
    """

    rows: tuple[int, int, int, int]
    keys: int


class Prepared(NamedTuple):
    """A view converted to another form: `kind` ("int8", "f16", ...). runs: name of the runs in which it is made."""

    view: View
    kind: str
    runs: str


@dataclass(frozen=True)
class Call:
    """One launch of a bound step: plan(sizes) -> Launch (or Order), in runs for which `when` holds (None: all runs).

    step:   None for a call that only prepares an operand.
    makes:  the operand that the call prepares from a view that the step reads. The call is left out if the operand
            exists already and no step has written the view since.
    leaves: the operand that the call writes in addition to, or instead of, the view that the step writes.
    """

    step: Step | None
    plan: Callable[[Sizes], Launch | Order]
    when: Callable[[Sizes], bool] | None = None
    makes: Prepared | None = None
    leaves: Prepared | None = None

    def only(self, when: Callable[[Sizes], bool]) -> "Call":
        """The same call, restricted to runs whose sizes satisfy `when`."""
        old = self.when
        return replace(self, when=when if old is None else lambda sizes: old(sizes) and when(sizes))

    def launches(self, sizes: Sizes) -> list[Launch | Order]:
        """The launch for a run of these sizes; an empty list if there is nothing to do."""
        if self.when is not None and not self.when(sizes):
            return []
        launch = self.plan(sizes)
        return [launch] if isinstance(launch, Order) or all(launch.grid) else []


def per_row(step: Step | None, kernel: Kernel, field: int, blocks: int, *args) -> Call:
    """A call with grid (rows, blocks): `blocks` blocks for each row that `field` counts. Rows are the x dimension,
    because only x may exceed 65535."""
    return Call(step, lambda sizes: Launch(kernel, (max(sizes.rows[field], 1), blocks, 1), args))


def ceil(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
