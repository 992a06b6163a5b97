"""Every spec in specs/, of families and single models, at toy sizes: resolved, verified and run on the reference."""

import numpy as np
import pytest

from numflow import network
from numflow.network import WeightSource
from numflow.reference.program import Program
from numflow.spec import list_specs
from tests.specs.case import run
from tests.specs.toy import VOCABULARY, ids, namings, toy_checkpoint

SPECS = {spec.name: spec for spec in list_specs()}
TOYS = [(name, naming, full) for name, spec in SPECS.items() if spec.type != "draft"
        for naming in namings(spec) for full in (False, True)]


@pytest.mark.parametrize(("name", "naming", "full"), TOYS, ids=[f"{n}-{m}{'-full' * f}" for n, m, f in TOYS])
@pytest.mark.thin(8)
def test_a_toy_of_every_spec_runs(name, naming, full):
    spec = SPECS[name]
    checkpoint = toy_checkpoint(spec, naming, full)
    built = network.build(spec, checkpoint)
    program = Program(built, WeightSource(built, checkpoint))
    encoder_ids = ids(7) if spec.type == "encoder-decoder" else None
    for output, view in built.outputs.items():
        y = run(program, ids(7), output, encoder_ids=encoder_ids)
        assert y.shape == (7, view.width)
        assert np.isfinite(y).all()
        assert y.std() > 1e-3
    assert built.facts["vocabulary"] == VOCABULARY
    if "logits" in built.outputs:
        assert built.outputs["logits"].width == VOCABULARY


def test_models_are_never_picked_by_detection():
    """Detection finds families; a spec that extends one for a single model is chosen by name."""
    models = [spec for spec in SPECS.values() if spec.section("model").get("source")]
    assert len(models) >= 33
    assert not [spec.name for spec in models if spec.section("detect")]
    assert not [spec.name for spec in SPECS.values() if spec not in models and not spec.section("detect")]
