"""States of recurrent steps: matrix states, whose storage type can be chosen, and others."""

from collections.abc import Mapping
from dataclasses import replace

from numflow.errors import RequestError, option
from numflow.ops import Network, State, Step, param
from numflow.quant.state import STATE_TYPES


def is_scan(step: Step) -> bool:
    """Whether a `linear_attention` is a selective scan: value heads of one column, which share their keys."""
    v, *others = step.inputs[2:]
    return v.width == param(step, "heads") and param(step, "key_heads") == 1 and \
        [view.width for view in others] in ([], [v.width])


def matrix_states(network: Network) -> dict[str, Step]:
    """Matrix states [heads, dk, dv] by name, each with a step that uses it."""
    return _states(network, False)


def scan_states(network: Network) -> dict[str, Step]:
    """States [heads, dk, 1] of selective scans by name, each with a step that uses it."""
    return _states(network, True)


def fades_by_column(network: Network, step: Step) -> bool:
    """Whether a `linear_attention` has a decay (rate or step) for each key column."""
    heads, others = param(step, "heads"), step.inputs[3:4]
    return network.weights[step.weights["rate"]].shape[0] > heads or any(view.width > heads for view in others)


def _states(network: Network, scans: bool) -> dict[str, Step]:
    return {param(step, "state"): step for steps in network.entries.values() for step in steps
            if step.op == "linear_attention" and is_scan(step) == scans}


def stored_states(network: Network, dtype: str) -> Mapping[str, State]:
    """The network's states, matrix states with this type: one of quant.state.STATE_TYPES, or "auto" for the spec's.

    Raises:
        RequestError: no such type, or no matrix states.
    """
    if dtype not in (known := ("auto", *STATE_TYPES)):
        raise RequestError(f"{option('state_type')} should be one of {', '.join(known)}, is {dtype!r}")
    if dtype == "auto":
        return network.states
    chosen = matrix_states(network)
    if not chosen and dtype != "f32":
        raise RequestError(f"{option('state_type', dtype)} is for states of heads that are matrices; {network.name} "
                           "has none")
    return {name: replace(state, dtype=dtype) if name in chosen else state for name, state in network.states.items()}
