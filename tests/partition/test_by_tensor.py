"""Sharded values and partial sums in networks that no family has: a step that needs whole values gets them gathered or
reduced.

Every network here computes a sharded `h` (a linear, an activation, and a linear on the shards, whose outputs are
partial sums), and then uses `h` or the sum in a step that needs whole values.
"""

from dataclasses import replace

import pytest

from numflow.errors import NetworkError
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import error, run_case
from numflow.network import WeightSource
from numflow.ops import OPS, View
from numflow.partition.cut.choose import _Chooser, choose
from numflow.partition.cut.cut import partition
from numflow.partition.run.program import PlanProgram
from numflow.reference import program as reference
from tests.partition.plans import model_of

WIDTH, INNER = 16, 32


def part(view, begin, width):
    return View(view.buffer, view.start + begin, width)


def in_pieces(b, x, outputs=WIDTH):
    """(h, y): h = act(up @ x) is sharded, and y = down @ h is a partial sum on each of two devices."""
    h, y = b.buffer(INNER), b.buffer(outputs)
    b.step("linear", (x,), (h,), {"weight": b.weight("up", b.normal(INNER, WIDTH))})
    b.step("act", (h,), (h,), kind="silu")
    b.step("linear", (h,), (y,), {"weight": b.weight("down", b.normal(outputs, INNER))})
    return h, y


def overwritten_in_part(b, x):
    h, y = in_pieces(b, x)
    b.step("copy", (part(x, 0, 8),), (part(h, 4, 8),))
    b.step("add", (y, part(h, 0, WIDTH)), (y,))
    return y


def sum_overwritten_in_part(b, x):
    _, y = in_pieces(b, x)
    b.step("scale", (part(x, 3, 5),), (part(y, 1, 5),), scale=2.0)
    return y


def read_in_part(b, x):
    h, y = in_pieces(b, x)
    b.step("add", (part(h, 5, WIDTH), y), (y,))
    return y


def gated_by_part_of_what_is_in_pieces(b, x):
    h, _ = in_pieces(b, x)
    _, z = in_pieces(b, x)
    b.step("gate_rows", (z, part(h, 20, 1)), (z,))
    return z


def gated_by_a_sum(b, x):
    _, y = in_pieces(b, x)
    _, gate = in_pieces(b, x, 1)
    b.step("gate_rows", (y, gate), (y,))
    return y


def gated_by_part_of_a_sum(b, x):
    _, y = in_pieces(b, x)
    _, gate = in_pieces(b, x)
    b.step("gate_rows", (y, part(gate, 2, 1)), (y,))
    return y


def added_to_itself_in_part(b, x):
    _, y = in_pieces(b, x)
    half, z = part(y, 8, 8), b.buffer(8)
    b.step("add", (part(y, 0, 8), half), (z,))
    return z


def sums_of_sums(b, x):
    """These steps work on partial sums: one all-reduce at the end."""
    _, y = in_pieces(b, x)
    _, z = in_pieces(b, x)
    b.step("scale", (y,), (y,), scale=0.5)
    b.step("add", (y, z), (y,), scale=3.0)
    b.step("gate_rows", (y, part(x, 1, 1)), (y,))
    return y


NETWORKS = (overwritten_in_part, sum_overwritten_in_part, read_in_part, gated_by_part_of_what_is_in_pieces,
            gated_by_a_sum, gated_by_part_of_a_sum, added_to_itself_in_part, sums_of_sums)


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("devices", ["0&1", "0&1&2"])
def test_what_is_read_is_whole(make, devices):
    b = Builder(make.__name__)
    (x,) = b.inputs(WIDTH)
    case = b.case(make(b, x))
    constants = {name: replace(weight, constant=b.arrays[name]) for name, weight in case.network.weights.items()}
    plan = partition(replace(case.network, weights=constants), devices, "reference")
    assert any(step.op == "all_reduce" for step in plan.devices[0].network.entries["main"])

    def cut(network, weights):
        return PlanProgram(plan, reference, lambda own: WeightSource(own, None))

    (expected,), (found,) = run_case(case, reference.Program), run_case(case, cut)
    assert error(found, expected) < 1e-5


def test_every_op_has_a_rule_for_cutting():
    assert set(_Chooser.RULES) == {*OPS, "send", "receive"}  # what groups exchange is there before they are cut
    built, _, _ = model_of("qwen3")
    ops = {step.op for part in partition(built, "0&1;2&3", "cpu").devices for step in part.network.entries["main"]}
    assert ops >= {"send", "receive", "all_reduce"}
    strange = replace(built, entries={"main": (replace(built.entries["main"][0], op="stir"),)})
    with pytest.raises(NetworkError, match="no rule says how devices of a group share stir"):
        choose(strange, "main", (0.5, 0.5), {}, {}, "split", "split")
    assert len(choose(strange, "main", (1.0,), {}, {}, "split", "split")) == 1
