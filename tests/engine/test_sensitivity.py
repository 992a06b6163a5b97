"""Recipes that meet a size, by measured sensitivity."""

from dataclasses import replace

import numpy as np
import pytest

from numflow import formats, network
from numflow.engine.calibrate import calibrate
from numflow.engine.sensitivity import ERRORS, Group, allocate, automatic_recipe, groups, sensitivities
from numflow.errors import RequestError
from numflow.network.quantise import plan_of, quantised
from tests.quant.small import TEXT, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    def quiet(tensors):  # whose errors count for little
        tensors["model.layers.0.mlp.down_proj.weight"] *= np.float32(0.01)

    return write_model(tmp_path_factory.mktemp("source"), change=quiet)


@pytest.fixture(scope="module")
def calibration(source):
    return calibrate(source, TEXT, 64, 8)


def test_a_recipe_of_the_wanted_size(source, calibration):
    checkpoint = formats.open_checkpoint(source)
    built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
    recipe = automatic_recipe(source, 4.5, calibration)
    other = quantised(checkpoint, plan_of(built, checkpoint, recipe))
    assert 4.1 < network.bits_per_weight(built, other) <= 4.5
    assert len({scheme for _, scheme in recipe.rules}) > 1


def test_what_hurts_most_is_found(source, calibration):
    checkpoint = formats.open_checkpoint(source)
    spec = network.choose_spec(checkpoint)
    found = groups(network.build(spec, checkpoint, fuse=False), checkpoint)
    samples = [np.array(ids) for ids in calibration.facts["sample"]]
    costs = sensitivities(spec, checkpoint, found, calibration, samples)
    by_module = {group.modules[0]: cost for group, cost in zip(found, costs)}
    assert by_module["blk.1.ffn_down"] > 3 * by_module["blk.0.ffn_down"] > 0
    again = sensitivities(spec, checkpoint, found[:2], calibration, samples)
    assert again == pytest.approx(costs[:2], rel=1e-4)  # every group is put back


def test_allocation():
    sizes = {name: 100 * (i + 2) for i, name in enumerate(ERRORS)}
    found = [Group((name,), (name,), 800, sizes) for name in ("a", "b", "c")]
    assert allocate(found, [1.0, 1.0, 1.0], 2) == ["q2"] * 3
    assert allocate(found, [1.0, 0.0, 0.0], 3)[0] != "q2"
    assert allocate(found, [5.0, 1.0, 1.0], 8) == ["q8"] * 3
    costly, cheap, _ = allocate(found, [10.0, 0.1, 0.1], 4)
    names = list(ERRORS)
    assert names.index(costly) > names.index(cheap)
    with pytest.raises(RequestError, match="1.9 bits per weight are too few: q2 alone takes 2.0000"):
        allocate(found, [1.0, 1.0, 1.0], 1.9)


def test_a_calibration_without_a_sample(source, calibration):
    with pytest.raises(RequestError, match="holds no sample of its text"):
        automatic_recipe(source, 4, replace(calibration, facts={}))
