"""An embedding table cut by rows: bit-identical to one device, with one copy of a tied table."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from numflow.cpu import program as cpu
from numflow.errors import RequestError
from numflow.network import WeightSource
from numflow.ops import Batch, Buffer, Network, Part, Step, View, Weight
from numflow.partition.cut.cut import partition
from numflow.partition.run.program import PlanProgram
from numflow.reference import program as reference
from tests.partition.plans import model_of

EXECUTORS = {"reference": reference, "cpu": cpu}
VOCABULARY, WIDTH = 150, 37


class _Constants(WeightSource):
    def __init__(self, network):
        super().__init__(network, None)


def _lookup(table, scale=1.0):
    """A network that returns rows of a table."""
    width = table.shape[1]
    x, layer, out = (View(name, 0, width) for name in ("x", "layer", "out"))
    steps = (Step("embed", (), (x,), {"table": "table"}, {"scale": scale}, "token_embd"),
             Step("act", (x,), (layer,), {}, {"kind": "relu"}, "blk.0.act"),
             Step("select_rows", (x,), (out,), label="select_rows"))
    buffers = {name: Buffer(name, rows, width) for name, rows in (("x", "tokens"), ("layer", "tokens"),
                                                                  ("out", "logits"))}
    weights = {"table": Weight("table", table.shape, constant=table, types=("F32",))}
    return Network("toy", {"main": steps}, buffers, weights, {}, {"out": out}, {})


def _run(program, tokens):
    each = np.arange(len(tokens), dtype=np.int32)
    try:
        return program.run(Batch(np.array(tokens, np.int32), each, np.array([0, len(tokens)], np.int32),
                                 np.zeros((1, 0), np.int32), each), output="out")
    finally:
        program.close()


def _table():
    table = np.random.default_rng(3).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    table[::3, ::2], table[::2, 1::3] = -0.0, 0.0
    table[7], table[VOCABULARY - 1] = -0.0, np.inf
    return table


@pytest.mark.parametrize(("executor", "transport"), [("reference", "threads"), ("cpu", "threads"),
                                                     ("cpu", "processes")])
@pytest.mark.parametrize(("devices", "scale"), [("0&1", 1.0), ("0*2&1&2", -1.5)])
@pytest.mark.merge
def test_every_row_comes_back_bit_for_bit(executor, transport, devices, scale):
    """Zeros keep their signs: a device adds -0.0 for tokens that it does not have."""
    table = _table()
    tokens = np.random.default_rng(4).permutation(VOCABULARY)
    plan = partition(_lookup(table, scale), devices, executor)
    found = _run(PlanProgram(plan, EXECUTORS[executor], _Constants, transport, threads=1), tokens)
    np.testing.assert_array_equal(found.view(np.int32), (table[tokens] * np.float32(scale)).view(np.int32))


def test_a_token_that_no_device_has_is_refused():
    for token in (VOCABULARY, -1):
        program = PlanProgram(partition(_lookup(_table()), "0&1"), cpu, _Constants, threads=1)
        with pytest.raises(RequestError, match=f"token id {token} is out of range: it should be in 0 .. 149"):
            _run(program, [3, token])


def _uses(network):
    """Names of the embedding tables, and of the output matrix."""
    steps = [step for entry in network.entries.values() for step in entry]
    return ({step.weights["table"] for step in steps if step.op == "embed"},
            {step.weights["weight"] for step in steps if step.label.rpartition(".")[2] == "output"})


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "bert", "m2m100"])
@pytest.mark.parametrize("devices", ["0&1", "0*2&1"])
def test_a_tied_table_is_one_weight_of_each_device(name, devices):
    built, *_ = model_of(name)
    assert _uses(built)[0] == _uses(built)[1]
    rows = []
    for part in partition(built, devices).devices:
        tables, heads = _uses(part.network)
        assert tables == heads and len(tables) == 1
        rows.append(part.network.weights[tables.pop()].shape[0])
    assert sum(rows) == built.weights[_uses(built)[0].pop()].shape[0]
    assert (rows[0] > rows[1]) == (devices == "0*2&1")


def test_groups_of_one_device_have_the_whole_table():
    built, *_ = model_of("qwen3")
    for part in partition(built, "0;1").devices:
        for step in part.network.entries["main"]:
            assert step.op != "embed" or step in built.entries["main"]


def test_a_table_of_wide_blocks_is_cut_too():
    """Each row is one block of 256 columns, so that a cut by columns is impossible."""
    built = _lookup(np.zeros((VOCABULARY, 256), np.float32))
    table = Weight("table", (VOCABULARY, 256), (Part("token_embd"),), types=("Q4_K",))
    plan = partition(replace(built, weights={"table": table}), "0&1")
    assert [list(part.network.weights) for part in plan.devices] == [["table[0:80]"], ["table[80:150]"]]


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_devices_hold_together_what_one_holds(name):
    """A group has one copy of every matrix except routers."""
    def numbers(*networks):
        return sum(prod(weight.shape) for network in networks for weight in network.weights.values()
                   if len(weight.shape) == 2 and "ffn_gate_inp" not in weight.name)

    built, *_ = model_of(name)
    assert numbers(*(part.network for part in partition(built, "0&1").devices)) == numbers(built)
