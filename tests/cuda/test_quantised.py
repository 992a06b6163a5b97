"""Checkpoints in the quantised formats of the hub on the simulator, against published logits."""

import numpy as np
import pytest

import numflow
from tests.golden.fixtures import TOLERANCE, load_case, relative_error
from tests.golden.test_quantised import FOLDERS

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("folder", [path for path in FOLDERS if (path / "expected.npz").exists()],
                         ids=lambda path: path.name)
def test_logits_and_greedy_tokens(folder):
    """The first prompt, at once, and its first tokens one by one."""
    case, expected = load_case(folder)
    ids, greedy = case["prompts"][0], case["greedy"][0]
    with numflow.load(folder, backend="cuda", gpu="simulator", activations="f32") as model:
        logits = model.logits([*ids, *greedy])
        assert relative_error(logits[:len(ids)], expected["logits_0"]) < TOLERANCE
        assert relative_error(logits[len(ids) - 1:-1], expected["step_logits_0"]) < TOLERANCE
        assert np.argmax(logits[len(ids) - 1:-1], axis=1).tolist() == greedy
        assert model.generate(ids, max_tokens=4, ignore_eos=True).ids == greedy[:4]
