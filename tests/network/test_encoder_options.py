"""Embeddings of a token that counts as dropped, rotary frequencies from a file, experts stacked as rows of one matrix,
and a first layer without steps.
"""

from importlib import import_module

import numpy as np
import pytest

from numflow import network
from numflow.engine.load import load
from numflow.errors import SpecError
from numflow.network import WeightSource
from numflow.network.batch import kept_rows
from numflow.ops import Batch
from numflow.spec import load_spec
from tests.engine.published import write_case
from tests.partition.plans import error, model_of, one_device, several_devices
from tests.specs.case import _batch, load_case, memory_checkpoint
from tests.specs.weights import values

MASK = 9


def test_shares_are_those_of_each_text():
    tokens = np.array([9, 1, 2, 9, 9, 9, 4, 5], np.int32)
    starts = np.array([0, 4, 4, 6, 8], np.int32)
    batch = Batch(tokens, tokens, starts, None, None)
    expected = [0, 1.6, 1.6, 0, 0, 0, 0.8, 0.8]  # half of the first text, all of the third, none of the last
    np.testing.assert_allclose(kept_rows(batch, MASK, 0.8)[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_texts_beside_one_another_keep_their_own_shares(tmp_path, backend):
    with load(write_case("esm2", tmp_path), backend=backend, activations="f32") as model:
        texts = [[5, MASK, 7, 8], [5, 6, 7], [MASK, MASK, 6, 7, 8]]
        together = model.embed(texts)
        for text, found in zip(texts, together):
            np.testing.assert_allclose(found, model.embed(text), rtol=1e-5, atol=1e-6)
        apart = [model.hidden([5, token, 7, 8]) for token in (MASK, 6)]
        assert np.abs(apart[0][0] - apart[1][0]).max() > 0.01


@pytest.mark.merge
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_traces_bring_those_rows_too(tmp_path, backend):
    built, checkpoint, given = model_of("esm2")
    program = import_module(f"numflow.{backend}.program").Program(built, WeightSource(built, checkpoint))
    batch = _batch(program, given["ids"], 0)
    labels = [row.label for row in program.trace(batch)]
    assert "token_kept" in labels
    found = {built.entries["main"][index].label: outputs[0] for index, outputs in program.walk(batch) if outputs}
    factors = kept_rows(batch, *built.facts["dropped"])
    assert np.isfinite(found["token_kept"]).all()
    np.testing.assert_allclose(found["token_kept"], found["token_embd"] * factors, rtol=1e-6)
    program.close()


def test_models_that_go_on_have_no_dropped_token(tmp_path):
    path, case = tmp_path / "mine.toml", load_case("mistral_nemo")
    path.write_text('extends = "llama"\n[embedding]\ndropped_token = 3\n', encoding="utf-8")
    with pytest.raises(SpecError, match=r"embedding\.dropped_token: expected -1 of a model that reads no whole"):
        network.build(load_spec(path), memory_checkpoint(case.configs[0], case.tensors))


def test_frequencies_of_a_file():
    case = load_case("esm2")
    name = next(name for name in case.tensors if name.endswith("inv_freq"))

    def built(tensors):
        checkpoint = memory_checkpoint(case.configs[0], tensors)
        return network.build(network.choose_spec(checkpoint), checkpoint).weights["rope.0"].constant
    stored = values(name, case.tensors[name]).astype(np.float32)
    np.testing.assert_array_equal(built(case.tensors), stored)
    own = built({tensor: shape for tensor, shape in case.tensors.items() if tensor != name})
    np.testing.assert_allclose(own, 1e4 ** -(np.arange(4) / 4), rtol=1e-6)
    with pytest.raises(SpecError, match=r"inv_freq': expected 4 frequencies for texts of any length"):
        built(case.tensors | {name: (3,)})


def test_experts_one_below_the_other():
    case = load_case("dbrx")
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
    source, at = WeightSource(built, checkpoint), "transformer.blocks.0.ffn.experts.mlp."
    for module, stored, turned in (("gate", "w1", False), ("up", "v1", False), ("down", "w2", True)):
        found = source.f32(f"blk.0.ffn_{module}_exps.weight")
        each = values(at + stored, case.tensors[at + stored]).astype(np.float32).reshape(5, 24, 32)
        np.testing.assert_array_equal(found, (each.swapaxes(1, 2) if turned else each).reshape(found.shape))
    with pytest.raises(SpecError, match=r"mlp\.w2' is \[120, 31\], but spec 'dbrx' expects"):
        wrong = memory_checkpoint(case.configs[0], case.tensors | {at + "w2": (120, 31)})
        network.build(network.choose_spec(wrong), wrong)


def test_a_first_layer_that_does_nothing_is_in_no_groups_way():
    built, checkpoint, given = model_of("mllama_first")
    expected = one_device(built, checkpoint, "reference", **given)
    for devices in ("0;1", "0;1;2"):
        assert error(several_devices(built, checkpoint, "reference", devices, **given), expected) == 0
    counts = several_devices(built, checkpoint, "reference", "0;1", {"layers": {"": (1, 2)}}, **given)
    assert error(counts, expected) == 0
