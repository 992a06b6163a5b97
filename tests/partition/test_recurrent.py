"""Recurrent layers by tensor: each device has some heads or channels of every state, and results do not change."""

import json
from dataclasses import replace

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import error, run_case
from numflow.network import WeightSource
from numflow.partition.cut.cut import partition
from numflow.partition.cut.recurrent import cut_states, read_in_pieces
from numflow.partition.cut.table import cut_table
from numflow.partition.run.program import PlanProgram
from numflow.reference import program as reference
from tests.conftest import shared
from tests.partition.plans import TOLERANCE, model_of
from tests.specs.case import relative_error

# Families of which two devices have half of every state each; others have heads that two do not share evenly.
HALVED = ("qwen3_5", "qwen3_next", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "jamba",
          "mamba", "minimax", "recurrent_gemma", "lfm2")
# The larger part of the numbers of two devices: 3 heads are 2 and 1; keys of a group, and tokens before, are on both.
FIXTURES = {"qwen3_5": 0.5, "kimi_linear": 0.67, "mamba2": 0.52, "mamba": 0.5, "granitemoehybrid": 0.53,
            "falcon_h1": 0.54, "minimax": 0.5, "recurrent_gemma": 0.5, "rwkv": 0.7}


def kept(network):
    return sum(state.size for state in network.states.values())


@pytest.mark.parametrize("name", HALVED)
def test_states_are_halved(name):
    built, _, _ = model_of(name)
    assert {kept(part.network) for part in partition(built, "0&1").devices} == {kept(built) / 2}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "rwkv" else pytest.mark.slow)
                                  for name in FIXTURES])
def test_published_numbers_on_two_devices(name):
    folder = shared("fixtures_2026", name)
    case = json.loads((folder / "case.json").read_text())
    with np.load(folder / "expected.npz") as file, load(folder, activations="f32", devices="0&1", chunk=7) as model:
        plan = model.program.plan
        for part in plan.devices:
            assert kept(part.network) / kept(plan.network) <= FIXTURES[name]
        for at, ids in enumerate(case["prompts"]):
            found = np.concatenate([rows for _, rows in model.iter_logits(ids)])
            assert relative_error(found, file[f"logits_{at}"]) < TOLERANCE
        texts = model.generate_batch(case["prompts"], max_tokens=12, ignore_eos=True)
        assert [list(text.ids) for text in texts] == case["greedy"]


def test_matrices_of_several_kinds_are_taken_apart_where_devices_share():
    built, _, _ = model_of("mamba2")
    (alone,) = partition(built, "0").devices
    assert set(alone.network.states) == set(built.states)
    rows = {row.step: row for row in cut_table(partition(built, "0&1"))}
    assert rows["ssm_conv1d.0-96"].spans == ("ssm_conv1d.0-96 0:32, ssm_conv1d.0-96.bias 0:32",
                                             "ssm_conv1d.0-96 32:96, ssm_conv1d.0-96.bias 32:96")
    assert (rows["scan"].how, rows["scan"].spans) == ("heads", ("2 heads", "4 heads"))
    assert (rows["ssm_out"].how, rows["ssm_out"].then) == ("row-parallel", "all_reduce")
    rows = {row.step: row for row in cut_table(partition(model_of("recurrent_gemma")[0], "0&1"))}
    assert (rows["lru"].how, rows["lru"].spans) == ("channels", ("24 channels", "24 channels"))


def delta(heads, key_heads, tiled):
    """A delta rule with heads of 5 columns and keys of 4, followed by a matrix; weights are constants."""
    b = Builder(f"{heads} {key_heads} {tiled}")
    inputs = b.inputs(key_heads * 4, key_heads * 4, heads * 5, heads, heads)
    for view, kind in ((inputs[3], "sigmoid"), (inputs[4], "sigmoid")):
        b.step("act", (view,), (view,), kind=kind)
    y, out = b.buffer(heads * 5), b.buffer(16)
    b.step("linear_attention", inputs, (y,), {"rate": b.weight("rate", -np.exp(b.normal(heads)))}, heads=heads,
           key_heads=key_heads, tiled=tiled, state=b.state(heads, 4, 5))
    b.step("linear", (y,), (out,), {"weight": b.weight("out", b.normal(16, heads * 5))})
    case = b.case(out, (((0, 3), (1, 1)), ((1, 2), (0, 2))))
    weights = {name: replace(weight, constant=b.arrays[name]) for name, weight in case.network.weights.items()}
    return replace(case, network=replace(case.network, weights=weights))


@pytest.mark.parametrize(("heads", "key_heads", "tiled", "columns", "keys"), [
    (8, 4, False, ((0, 4), (4, 8)), ((0, 2), (2, 4))), (8, 4, True, ((0, 4), (4, 8)), ()),
    (4, 4, True, ((0, 2), (2, 4)), ((0, 2), (2, 4))), (6, 1, False, ((0, 3), (3, 6)), ()),
    (6, 3, True, ((0, 3), (3, 6)), ()), (2, 2, False, ((0, 1), (1, 2)), ((0, 1), (1, 2)))])
def test_heads_have_their_key_heads(heads, key_heads, tiled, columns, keys):
    network = delta(heads, key_heads, tiled).network
    (cut,) = cut_states(network, (1.0, 1.0)).values()
    assert (cut.columns, cut.keys, cut.fits) == (tuple((5 * begin, 5 * end) for begin, end in columns), keys, True)
    (step,) = (step for step in network.entries["main"] if step.op == "linear_attention")
    assert read_in_pieces(step, cut)[step.inputs[4]] == columns


@pytest.mark.parametrize("devices", ["0&1", "0&1&2", "0*3&1", "0&1&2&3&4&5&6"])
@pytest.mark.parametrize(("heads", "key_heads", "tiled"), [(6, 2, False), (6, 2, True), (6, 3, True), (5, 1, False)])
def test_any_number_of_devices(heads, key_heads, tiled, devices):
    case = delta(heads, key_heads, tiled)
    plan = partition(case.network, devices, "reference")
    assert sum(kept(part.network) for part in plan.devices) == kept(case.network)

    def program(network, weights):
        return PlanProgram(plan, reference, lambda own: WeightSource(own, None))

    for found, expected in zip(run_case(case, program), run_case(case, reference.Program), strict=True):
        assert error(found, expected) < TOLERANCE
