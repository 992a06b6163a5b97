"""Published adapters on tiny bases, against the logits of the libraries that they are made for."""

import pytest

import numflow
from numflow.formats import open_checkpoint
from tests.conftest import SHARED, shared
from tests.formats.peft import pair, write_adapter
from tests.golden.fixtures import TOLERANCE, load_case, relative_error

FOLDERS = sorted(path.parent for path in (SHARED / "fixtures_quantised").glob("*/case.json")
                 if (path.parent / "adapter").is_dir())
IDS = [folder.name for folder in FOLDERS]

if not FOLDERS:
    pytest.skip("no fixtures_quantised; NUMFLOW_SHARED names its folder", allow_module_level=True)


def matches(model, case, expected, greedy, kind="", **more):
    for i, ids in enumerate(case["prompts"]):
        assert relative_error(model.logits(ids, **more), expected[f"{kind}logits_{i}"]) < TOLERANCE
        if greedy is None:
            continue
        assert model.generate(ids, max_tokens=len(greedy[i]), ignore_eos=True, **more).ids == greedy[i]
        steps = model.logits([*ids, *greedy[i]], **more)[len(ids) - 1:-1]
        assert relative_error(steps, expected[f"{kind}step_logits_{i}"]) < TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
@pytest.mark.thin(6)
def test_merged(folder, backend):
    case, expected = load_case(folder)
    adapter = folder / case["adapter"]["path"]
    with numflow.load(folder, backend, activations="f32", adapters={"a": adapter}, merge="a") as model:
        matches(model, case, expected, case["adapter"]["greedy"], "adapter_")
    with numflow.load(folder, backend, activations="f32", adapter=[f"{adapter}=0.5"]) as model:
        matches(model, case, expected, None, "half_")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.merge
def test_on_a_base_whose_columns_are_in_another_order(backend, tmp_path):
    folder = shared("fixtures_quantised", "gptq_4bit_sym_act")
    case, _ = load_case(folder)
    found, tensors = open_checkpoint(folder), {}
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        for layer in range(2):
            name = f"model.layers.{layer}.{module}"
            tensors |= pair(name, found.tensors[f"{name}.weight"].shape)
    adapter = write_adapter(tmp_path, tensors)
    ids = case["prompts"][0]
    with numflow.load(folder, backend, activations="f32", adapters={"a": adapter}) as model:
        row, base = model.logits(ids, adapter="a"), model.logits(ids)
    with numflow.load(folder, backend, activations="f32", adapter=[str(adapter)]) as model:
        expected = model.logits(ids)
    assert relative_error(row, expected) < TOLERANCE < relative_error(base, expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
@pytest.mark.thin(6)
def test_side_by_side(folder, backend):
    case, expected = load_case(folder)
    adapter = folder / case["adapter"]["path"]
    with numflow.load(folder, backend, activations="f32", adapters={"a": adapter, "half": (adapter, 0.5)}) as model:
        matches(model, case, expected, case["greedy"])
        matches(model, case, expected, case["adapter"]["greedy"], "adapter_", adapter="a")
        for i, ids in enumerate(case["prompts"]):
            assert relative_error(model.logits(ids, adapter="half"), expected[f"half_logits_{i}"]) < TOLERANCE
            rows = model.logits_batch([ids] * 3, adapters=["a", None, "half"])
            assert [relative_error(row, expected[f"{kind}logits_{i}"]) < TOLERANCE
                    for row, kind in zip(rows, ("adapter_", "", "half_"), strict=True)] == [True] * 3
