"""The form of a row of the op table, and the rows of ops that only some networks have (ops.py has the others)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Op:
    """A row of the op table. Optional inputs and weights end in '?'.

    local:  a key of ops.LOCAL. params: name -> default (REQUIRED if none).
    """

    name: str
    local: str
    what: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


REQUIRED = object()

# What devices do together, by passes of `partition`; a device is its index in the plan. Each pair and each group of
# devices meets in the order of the steps, which all of them have in common.
EXCHANGES = {op.name: op for op in (
    Op("send", "devices", "hand x to device `peer`, which has a `receive` for it", ("x",), (), (), {"peer": REQUIRED}),
    Op("receive", "devices", "y = what device `peer` sent", (), ("y",), (), {"peer": REQUIRED}),
    Op("all_reduce", "devices", "y = the sum of x over the devices `adds`, in that order; the others of `group` have "
       "no x and get the same y", ("x?",), ("y",), (), {"group": REQUIRED, "adds": REQUIRED}),
    Op("all_gather", "devices", "columns spans[i] of y = x of device group[i]; (a, a) where it has none. The spans "
       "cover y; where they overlap, devices have the same numbers",
       ("x?",), ("y",), (), {"group": REQUIRED, "spans": REQUIRED}),
)}

# What rows add by adapters of their own (network/adapters); programs whose `can` has "adapt" do these steps. The
# matrices come and go while the program runs (Program.set_adapter), by `part`. A, B and v are those of the adapter of
# the row's sequence; rows without one, and parts that it does not change, stay as they are.
ADAPTING = {op.name: op for op in (
    Op("adapt", "batch", "y = s y + B (A x) + v of the row. With ids i32 [T, S], where rows of y are routes and x has "
       "T or T * S rows, A, B and v are those of the row's expert, of which there are those from number `first` on",
       ("x", "y", "ids?"), ("y",), (), {"part": REQUIRED, "first": 0}),
    Op("adapt_rows", "batch", "y[t] += B (row tokens[t] of A), which has `rows` from number `first` on",
       ("y",), ("y",), (), {"part": REQUIRED, "rows": REQUIRED, "first": 0}),
)}
