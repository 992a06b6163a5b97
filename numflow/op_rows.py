"""The row type of the op table, and the rows of exchanges and adapters; ops.py has all other rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The inputs that a row of an op's output depends on.
LOCAL = {
    "elements": "the same element of each input",
    "heads": "the same row of each input; each head depends on the same head",
    "rows": "the same row of each input",
    "batch": "other rows, or arrays of the batch",
    "devices": "values of other devices",
}


@dataclass(frozen=True)
class Op:
    """A row of the op table. Optional inputs and weights end in '?'.

    local:      a key of LOCAL.
    definition: formula, shapes and meaning of the parameters.
    params:     name -> default (REQUIRED if none).
    """

    name: str
    local: str
    definition: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


REQUIRED = object()

# Exchanges between devices, added by passes of `partition`; a device is its index in the plan. Each pair and each group
# of devices exchanges values in the order of the steps, which is the same on all of its devices.
EXCHANGES = {op.name: op for op in (
    Op("send", "devices", "send x to device `peer`, which has the matching `receive`", ("x",), (), (),
       {"peer": REQUIRED}),
    Op("receive", "devices", "y = the value that device `peer` sent", (), ("y",), (), {"peer": REQUIRED}),
    Op("all_reduce", "devices", "y = the sum of x over the devices `adds`, in that order; the other devices of `group` "
       "have no x and get the same y", ("x?",), ("y",), (), {"group": REQUIRED, "adds": REQUIRED}),
    Op("all_gather", "devices", "columns spans[i] of y = x of device group[i]; spans[i] = (a, a) if it has no x. The "
       "spans cover y; where spans overlap, devices have the same values",
       ("x?",), ("y",), (), {"group": REQUIRED, "spans": REQUIRED}),
)}

# Low-rank adapters (LoRA) of sequences (network/adapters); only programs whose `can` has "adapt" do these steps. The
# matrices are set while the program runs (Program.set_adapter), by `part`. A, B, s and v belong to the adapter of the
# row's sequence; rows without an adapter, and parts that an adapter does not change, stay unchanged.
ADAPTING = {op.name: op for op in (
    Op("adapt", "batch", "y = s y + B (A x) + v. With ids i32 [T, S] rows of y are routes, x has T or T * S rows, and "
       "A, B, s and v belong to the row's expert; the adapter has the experts from id `first` on", ("x", "y", "ids?"),
       ("y",), (), {"part": REQUIRED, "first": 0}),
    Op("adapt_rows", "batch", "y[t] += B (row tokens[t] of A); A has `rows` rows, of tokens from `first` on",
       ("y",), ("y",), (), {"part": REQUIRED, "rows": REQUIRED, "first": 0}),
)}
