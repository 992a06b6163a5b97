"""Fusion patterns, found from stored types alone."""

from dataclasses import replace

import pytest

from numflow.cuda.patterns import Form, described, together
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.errors import NetworkError
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource

SHAPE = Shape(2, 64, 2, 1, 96, 40, 64)


def test_groups_of_a_decoder():
    """The last layer continues with logit rows only, so its down-projection is not fused with a norm."""
    network, _ = random_network(SHAPE, "q4")
    assert [(row.layers, row.pattern, row.operand) for row in described(network, "int8")] == [
        ("0", "rms_norm (operand)", "f16, int8"), ("0-1", "rope+rope+cache_write", "-"),
        ("0-1", "linear+add+rms_norm", "int8"), ("0-1", "linear+act_mul", "int8"),
        ("0", "linear+add+rms_norm", "int8"), ("1", "linear+add", "-"), ("", "rms_norm (operand)", "f16, int8")]


def test_float32_arithmetic_leaves_nothing_late():
    """With float32 activations, few and many tokens have the same operands, so no reader applies a norm's scale."""
    network, _ = random_network(SHAPE, "q4")
    found = together(network, "main", "f32", network.caches)
    assert not found.units and not found.late and not found.forms
    assert {group.pattern for group in found.groups} == {"linear+add", "rope+rope+cache_write"}


def test_a_norm_taken_late_is_told_to_its_readers():
    network, _ = random_network(SHAPE, "F16")
    found, steps = together(network, "main", "int8", network.caches), network.entries["main"]
    assert found.late and all(steps[index].op == "linear" for index in found.late)
    assert {steps[group.steps[-1]].params["eps"] for group in found.groups if "rms_norm" in group.pattern} == set(
        found.late.values())
    first = next(index for index, step in enumerate(steps) if step.op == "rms_norm")
    assert found.forms[first] == (Form("few", None, True), Form("many", "f16", False))


def test_caches_elsewhere_are_written_by_steps_of_their_own():
    network, _ = random_network(SHAPE, "q4")
    assert not any("rope" in group.pattern for group in together(network, "main", "int8", ()).groups)


def test_what_is_in_memory_must_be_what_the_types_tell():
    network, checkpoint = random_network(SHAPE, "q4")
    lying = replace(network, weights={name: replace(weight, types=("q8",)) if weight.types == ("q4",) else weight
                                      for name, weight in network.weights.items()})
    with pytest.raises(NetworkError, match=r"is stored as q4, its types \(q8\) imply q8"):
        Program(lying, WeightSource(network, checkpoint), gpu=Notebook())
