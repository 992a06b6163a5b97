"""Recipes for a target size, by measured sensitivity."""

from dataclasses import replace

import numpy as np
import pytest

from numflow import formats, network
from numflow.engine.quantise.calibrate import calibrate
from numflow.engine.quantise.quantize import quantize
from numflow.engine.quantise.sensitivity import MatrixGroup, allocate, automatic_recipe, groups, sensitivities
from numflow.errors import RequestError
from numflow.network.quantise.quantise import plan_of, quantised
from numflow.quant import ROW_SCHEMES
from numflow.quant.recipe import KEEP, read_recipe, recipe_of
from tests.engine.translators import write_translator
from tests.quant.small import TEXT, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    def quiet(tensors):  # whose errors count for little
        tensors["model.layers.0.mlp.down_proj.weight"] *= np.float32(0.01)

    return write_model(tmp_path_factory.mktemp("source"), change=quiet)


@pytest.fixture(scope="module")
def calibration(source):
    return calibrate(source, TEXT, 64, 8)


@pytest.mark.merge
def test_a_recipe_of_the_wanted_size(source, calibration):
    checkpoint = formats.open_checkpoint(source)
    built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
    recipe = automatic_recipe(source, 4.5, calibration)
    other = quantised(checkpoint, plan_of(built, checkpoint, recipe))
    assert 4.1 < network.bits_per_weight(built, other) <= 4.5
    assert len({scheme for _, scheme in recipe.rules}) > 1


@pytest.mark.merge
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


@pytest.mark.parametrize("case", ["modernbert_embedding", pytest.param("m2m100", marks=pytest.mark.slow)])
@pytest.mark.merge
def test_encoders_have_a_sensitivity_too(tmp_path, case):
    """Of hidden states where there is no head; what both halves of an encoder-decoder read is the same text."""
    found = calibrate(write_translator(tmp_path, (), case=case), "w1 w2 w3 w4 w5 w6 " * 9, 24, 2)
    checkpoint = formats.open_checkpoint(tmp_path)
    spec = network.choose_spec(checkpoint)
    parts = groups(network.build(spec, checkpoint, fuse=False), checkpoint, found)
    costs = sensitivities(spec, checkpoint, parts, found, [np.array(ids) for ids in found.facts["sample"]])
    assert len(costs) > 8 and all(0 < cost < 1 for cost in costs)
    recipe = automatic_recipe(tmp_path, 4.8, found)
    assert len({scheme for _, scheme in recipe.rules}) > 1


SIZES = {name: 100 * (i + 2) for i, name in enumerate(ROW_SCHEMES)}
ERRORS = {name: 4.0 ** -i for i, name in enumerate(ROW_SCHEMES)}


def test_allocation():
    found = [MatrixGroup((name,), (name,), 800, SIZES, ERRORS) for name in ("a", "b", "c")]
    assert allocate(found, [1.0, 1.0, 1.0], 2) == ["q2"] * 3
    assert allocate(found, [1.0, 0.0, 0.0], 3) == ["q4", "q2", "q2"]
    assert allocate(found, [5.0, 1.0, 1.0], 8) == ["q8"] * 3
    costly, cheap, _ = allocate(found, [10.0, 0.1, 0.1], 4)
    names = list(ERRORS)
    assert names.index(costly) > names.index(cheap)
    for bits in (1.9, float("nan")):
        with pytest.raises(RequestError, match=f"{bits:g} bits per weight are too few: .*q2. takes 2.0000"):
            allocate(found, [1.0, 1.0, 1.0], bits)


def test_what_is_small_and_exact_already_stays():
    exact = MatrixGroup(("a",), ("a",), 800, {**SIZES, KEEP: 450}, {**ERRORS, KEEP: 0.0})
    other = MatrixGroup(("b",), ("b",), 800, SIZES, ERRORS)
    assert allocate([exact, other], [1.0, 1.0], 6.25) == [KEEP, "q8"]  # never something larger than it is
    assert allocate([exact, other], [1.0, 1.0], 2.1) == ["q2", "q2"]


def test_errors_are_those_of_the_matrices(source, calibration, tmp_path):
    def coarse(tensors):  # 4 values, which all schemes of two bits and more hold
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = np.sign(tensors[name]).astype(np.float32) * np.float32(0.1)

    checkpoint = formats.open_checkpoint(write_model(tmp_path, change=coarse))
    found = groups(network.build(network.choose_spec(checkpoint), checkpoint, fuse=False), checkpoint, calibration)
    by_module = {group.modules[0]: group for group in found}
    coarse, plain = by_module["blk.0.ffn_up"].errors, by_module["blk.1.ffn_up"].errors
    assert coarse["q4"] < 0.2 * plain["q4"] and list(plain) == list(ROW_SCHEMES)
    assert plain["q2"] > 2 * plain["q3"] > 8 * plain["q5"] > 32 * plain["q8"]


@pytest.mark.slow  # of the same as the test of `allocate`
def test_a_model_that_is_small_already_stays(source, calibration, tmp_path):
    quantize(formats.open_checkpoint(source), tmp_path / "small", read_recipe("q3"))
    with pytest.raises(RequestError, match="already has no more than 5 bits per weight"):
        automatic_recipe(tmp_path / "small", 5, calibration)
    recipe = automatic_recipe(tmp_path / "small", 3.2, calibration)
    assert {scheme for _, scheme in recipe.rules} == {"q2", KEEP}


@pytest.mark.merge
def test_what_has_to_stay_counts(tmp_path):
    """Matrices of 80 columns, which q4_b16 divides and no scheme of numflow's."""
    source = write_model(tmp_path / "source", ffn=80)
    coarse = recipe_of({"weights": "keep", "tensors": {"*ffn_down": "q4_b16"}}, "coarse")
    quantize(formats.open_checkpoint(source), tmp_path / "x", coarse)
    found = calibrate(tmp_path / "x", TEXT, 64, 2)
    recipe = automatic_recipe(tmp_path / "x", 3.6, found)
    made = quantize(formats.open_checkpoint(tmp_path / "x"), tmp_path / "y", recipe)
    assert 3 < made["bits_per_weight"] <= 3.6 and {"q4_b16"} < {row["type"] for row in made["tensors"]}
    with pytest.raises(RequestError, match=r"too few: .*\(q2 and the unquantised matrices\) takes 2.8"):
        automatic_recipe(tmp_path / "x", 2.7, found)


def test_a_calibration_without_a_sample(source, calibration):
    with pytest.raises(RequestError, match="has no sample of its text"):
        automatic_recipe(source, 4, replace(calibration, facts={}))
