"""Every published family, on every executor, against logits that nobody here computed."""

import pytest

import numflow
from tests.golden.fixtures import TOLERANCE, folders, load_case, relative_error

BACKENDS = ("reference", "cpu")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
@pytest.mark.thin(8)
def test_logits_and_greedy_tokens(folder, backend):
    case, expected = load_case(folder)
    with numflow.load(folder, backend=backend, activations="f32") as model:
        if case["kind"] == "causal":
            _causal(model, case, expected)
        elif case["kind"] == "masked_lm":
            _masked(model, case, expected)
        else:
            _translation(model, case, expected)


def _causal(model, case, expected):
    for i, ids in enumerate(case["prompts"]):
        assert relative_error(model.logits(ids), expected[f"logits_{i}"]) < TOLERANCE
        greedy = case["greedy"][i]
        assert model.generate(ids, max_tokens=len(greedy), ignore_eos=True).ids == greedy
        assert relative_error(model.logits([*ids, *greedy])[len(ids) - 1:-1], expected[f"step_logits_{i}"]) < TOLERANCE


def _masked(model, case, expected):
    for i, ids in enumerate(case["prompts"]):
        types = case["token_type_ids"][i]
        assert relative_error(model.logits(ids, token_type_ids=types), expected[f"logits_{i}"]) < TOLERANCE
        assert relative_error(model.hidden(ids, token_type_ids=types), expected[f"hidden_{i}"]) < TOLERANCE


def _translation(model, case, expected):
    for i, (source, prefix) in enumerate(zip(case["encoder_inputs"], case["decoder_prefixes"], strict=True)):
        assert relative_error(model.hidden(source), expected[f"encoder_hidden_{i}"]) < TOLERANCE
        assert relative_error(model.logits(prefix, encoder_ids=source), expected[f"logits_{i}"]) < TOLERANCE
        greedy = case["greedy"][i]
        tokens = [*case["greedy_prefix"][i], *greedy]
        steps = model.logits(tokens, encoder_ids=source)[-len(greedy) - 1:-1]
        assert relative_error(steps, expected[f"step_logits_{i}"]) < TOLERANCE
        assert steps.argmax(1).tolist() == greedy
