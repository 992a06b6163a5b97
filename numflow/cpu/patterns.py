"""Fusion patterns: neighbouring steps that one kernel does, found from stored types and options alone.

    linear + add                   the addition is part of the store of the product
    norm or activation + linear    the operand of the product is computed from the input of the first step

Fusion saves a pass over memory and a barrier; the results stay the same, bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence

from numflow.cpu.estimate import planned
from numflow.cpu.linear.activations import NAMES
from numflow.cpu.linear.linear import activations_of, can_add, operand_kinds, operand_of
from numflow.cpu.linear.operands import can_make
from numflow.network.describe import GroupFacts, facts_of
from numflow.network.passes.dataflow import fusible_adds, readers, unchanged
from numflow.network.passes.grouping import Group, grouped
from numflow.ops import Network, Step, View


def groups(network: Network, entry: str, activations: str) -> tuple[Group, ...]:
    """The groups of fused steps of an entry, for an option "activations"."""
    steps, outputs = network.entries[entry], tuple(network.outputs.values())

    def matrix(step: Step):
        return planned(network.weights[step.weights["weight"]])

    adds = {add: i for i, add in fusible_adds(steps, outputs).items() if can_add(matrix(steps[i]))}
    made = operands_made(steps, outputs, lambda reader: operand_kinds(
        matrix(reader), activations_of(reader, network, activations)))
    return grouped(steps, made | adds)


def described(network: Network, activations: str) -> list[GroupFacts]:
    """Facts of the groups of all entries, in order of first appearance."""
    def operand(entry: str, group: Group) -> str:
        step = network.entries[entry][group.at]
        matrix = planned(network.weights[step.weights["weight"]])
        return NAMES[operand_of(matrix, activations_of(step, network, activations))]
    return facts_of("cpu", network, {entry: groups(network, entry, activations) for entry in network.entries}, operand)


def operands_made(steps: Sequence[Step], outputs: Iterable[View], kinds: Callable[[Step], object]) -> dict[int, int]:
    """Index of a step -> index of the linear whose operand's making it is fused with.

    kinds: returns the kinds of operands of a linear; all readers of the step's output must have the same.
    """
    protected, made = tuple(outputs), {}
    for i, step in enumerate(steps):
        if can_make(step) and not any(view.overlaps(step.outputs[0]) for view in protected):
            # `adapt` steps read the view too: the fused kernel then stores it besides the operand.
            reading = readers(steps, i, beside=("adapt",))
            if reading and len({kinds(steps[reader]) for reader in reading}) == 1 and unchanged(steps, i, reading[0]):
                made[i] = reading[0]
    return made
