"""Published families, placed by `numflow.load`: bit-identical by layer, within 1e-5 by tensor, equal greedy tokens."""

import numpy as np
import pytest

import numflow
from tests.golden.fixtures import folders, load_case
from tests.partition.plans import TOLERANCE, error

BY_LAYER = ("0;1", "0*2;1", "cpu;0")
BY_TENSOR = ("0&1", "0&1;2&3")


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
@pytest.mark.thin(10)
def test_placed(folder):
    case, _ = load_case(folder)
    expected, tokens = _results(folder, case)
    for devices in (*BY_LAYER, *BY_TENSOR):
        found, greedy = _results(folder, case, devices=devices)
        for name, values in expected.items():
            if devices in BY_LAYER:
                np.testing.assert_array_equal(found[name], values, err_msg=devices)
            else:
                assert error(found[name], values) < TOLERANCE, devices
        assert greedy == tokens


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_processes_and_threads_give_the_same_bits(folder):
    case, _ = load_case(folder)
    for devices in ("0*2;1", "0&1"):
        threads, greedy = _results(folder, case, devices=devices)
        processes, tokens = _results(folder, case, devices=devices, transport="processes")
        assert tokens == greedy
        for output, values in threads.items():
            np.testing.assert_array_equal(processes[output], values, err_msg=devices)


def test_processes_of_one_family():
    """A quick version of the test above: experts, or a dense decoder if only the repository's files are available."""
    here = {folder.name: folder for folder in folders()}
    folder = here.get("mixtral_8x7b") or here["fusellm_7b"]
    case, _ = load_case(folder)
    threads, greedy = _results(folder, case, devices="0&1")
    processes, tokens = _results(folder, case, devices="0&1", transport="processes")
    np.testing.assert_array_equal(processes["logits"], threads["logits"])
    assert tokens == greedy


def _results(folder, case, **options):
    """Outputs by name, and greedy tokens."""
    with numflow.load(folder, activations="f32", threads=1, **options) as model:
        if case["kind"] == "causal":
            ids = case["prompts"][0]
            return {"logits": model.logits(ids)}, model.generate(ids, max_tokens=5, ignore_eos=True).ids
        if case["kind"] == "masked_lm":
            given = {"token_type_ids": case["token_type_ids"][0]}
            return {output: getattr(model, output)(case["prompts"][0], **given) for output in ("logits", "hidden")}, []
        source, prefix = case["encoder_inputs"][0], case["decoder_prefixes"][0]
        return {"encoder_hidden": model.hidden(source), "logits": model.logits(prefix, encoder_ids=source)}, []
