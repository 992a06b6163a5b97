"""Tiny checkpoints in the quantised formats of the hub, against logits that nobody here computed."""

import json

import pytest

import numflow
from numflow.errors import FormatError
from tests.conftest import SHARED
from tests.golden.fixtures import TOLERANCE, load_case, relative_error

FOLDERS = [path.parent for path in sorted((SHARED / "fixtures_quantised").glob("*/case.json"))
           if not (path.parent / "adapter").exists()]
_FAST = {"gptq_4bit_sym_act", "bnb_nf4", "mxfp4_gpt_oss"}
_CASES = [pytest.param(path, id=path.name, marks=[] if path.name in _FAST else [pytest.mark.slow]) for path in FOLDERS]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("folder", _CASES)
@pytest.mark.thin(6)
def test_logits_and_greedy_tokens(folder, backend):
    if not (folder / "expected.npz").exists():
        with pytest.raises(FormatError, match=json.loads((folder / "case.json").read_text())["error_must_name"]):
            numflow.load(folder, backend=backend)
        return
    case, expected = load_case(folder)
    with numflow.load(folder, backend=backend, activations="f32") as model:
        for i, ids in enumerate(case["prompts"]):
            assert relative_error(model.logits(ids), expected[f"logits_{i}"]) < TOLERANCE
            greedy = case["greedy"][i]
            assert model.generate(ids, max_tokens=len(greedy), ignore_eos=True).ids == greedy
            steps = model.logits([*ids, *greedy])[len(ids) - 1:-1]
            assert relative_error(steps, expected[f"step_logits_{i}"]) < TOLERANCE


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("folder", [case for case in _CASES if case.id != "unknown_method"])
@pytest.mark.thin(4)
def test_bytes_in_memory(folder, backend):
    if backend == "cuda":
        pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    options = {"gpu": "simulator"} if backend == "cuda" else {"activations": "f32"}  # kernels of the test above
    in_files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with numflow.load(folder, backend=backend, **options) as model:
        assert 0.7 * in_files < model.program.weights_bytes < 1.1 * in_files
