"""Adapters whose modules are fused otherwise than the base's files, against PEFT's results and sums computed here."""

import json
from contextlib import closing

import numpy as np
import pytest
from safetensors.numpy import save_file

from numflow import network
from numflow.errors import FormatError, RequestError, SpecError
from numflow.formats.adapter import Adapter, open_adapter
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.merge import merged
from numflow.network.adapters.modules import rows_together
from numflow.network.adapters.steps import adaptable, parts_of
from numflow.network.weights.source import WeightSource
from numflow.reference.program import Program
from tests.network.peft_cases import CASES, FOLDER, MERGED, adapter_values
from tests.network.test_adapters import FACTOR, PATH, low_rank, tensor
from tests.network.test_adapters_names import opened
from tests.specs.case import _batch, load_case, memory_checkpoint, relative_error, run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thin(3)
def test_against_peft(name, tmp_path):
    with np.load(FOLDER / f"{name}.npz") as file:
        about, expected = json.loads(file["about"].tobytes()), file["expected"]
    save_file({key: adapter_values(key, shape) for key, shape in about["tensors"].items()},
              tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(about["config"]))
    adapter, case = open_adapter(tmp_path), load_case(about["base"])
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec, rows, output = network.choose_spec(found), about["rows"], about["output"]
    whole = merged(found, spec, [(adapter, 1.0)])
    with closing(Program(built := network.build(spec, whole), WeightSource(built, whole))) as program:
        assert relative_error(run(program, about["ids"], output)[rows], expected) < 1e-4
    built = adaptable(network.build(spec, found), found)
    with closing(Program(built, WeightSource(built, found))) as program:
        base = run(program, about["ids"], output)[rows]
        assert relative_error(base, expected) > 0.1
        if name in MERGED:
            with pytest.raises(RequestError, match="merge the adapter"):
                parts_of(built, found, fitted(adapter, found, spec), 1.0)
            return
        program.set_adapter(1, parts_of(built, found, fitted(adapter, found, spec), 1.0))
        batch = _batch(program, about["ids"], 0)
        batch.adapters = np.ones(1, np.int32)
        assert relative_error(program.run(batch, entry="main", output=output)[rows], expected) < 1e-4
        assert np.array_equal(run(program, about["ids"], output)[rows], base)


WHOLE = "encoder.layers.0.attn.Wqkv.weight"


def of_module(letter: str, role: str = "weight") -> str:
    return f"layers.0.self_attn.{letter}_proj.{role}"


def test_rows_of_a_module_in_a_matrix_of_three():
    found, spec = opened("nomic_bert")
    n, k = found.tensors[WHOLE].shape
    changes = {of_module(letter): low_rank(letter * 3, (n // 3, k)) for letter in "qv"}
    some = merged(found, spec, [(Adapter(PATH, "hf", changes), 0.5)]).tensors[WHOLE].f32()
    expected = found.tensors[WHOLE].f32().astype(np.float64)
    for place, letter in ((0, "q"), (2, "v")):
        change = changes[of_module(letter)]
        expected[place * n // 3:][:n // 3] += 0.5 * FACTOR * change.b.f32() @ change.a.f32()
    assert np.allclose(some, expected, atol=1e-5)
    assert np.array_equal(some[n // 3:2 * n // 3], found.tensors[WHOLE].f32()[n // 3:2 * n // 3])
    parts = parts_of(built := adaptable(network.build(spec, found), found), found,
                     fitted(Adapter(PATH, "hf", changes), found, spec), 1.0)
    assert {part.a.shape[0] for part in parts.values() for part in part if part is not None} <= {3, 6}
    assert built.entries


def test_lengths_and_biases_of_rows_that_no_module_has_stay():
    found, spec = opened("nomic_bert")
    n, k = found.tensors[WHOLE].shape
    bias = WHOLE.replace(".weight", ".bias")
    adapter = Adapter(PATH, "hf", {of_module("k"): low_rank("kk", (n // 3, k), magnitude=True)},
                      replaced={of_module("v", "bias"): tensor("v", np.full(n // 3, 7.0))})
    some = merged(found, spec, [(adapter, 1.0)]).tensors
    assert np.array_equal(some[WHOLE].f32()[:n // 3], found.tensors[WHOLE].f32()[:n // 3])
    lengths = np.linalg.norm(some[WHOLE].f32()[n // 3:2 * n // 3], axis=1)
    assert np.allclose(lengths, adapter.added[of_module("k")].magnitude.f32(), atol=1e-5)
    assert (some[bias].f32() == np.repeat([0, 0, 7], n // 3)).all()


def test_lengths_of_some_parts_alone():
    found, spec = opened("nomic_bert")
    n, k = found.tensors[WHOLE].shape
    changes = {of_module(letter): low_rank(letter * 3, (n // 3, k), magnitude=letter == "q") for letter in "qk"}
    adapter, base = Adapter(PATH, "hf", changes), found.tensors[WHOLE].f32()
    q, old_k, v = np.split(merged(found, spec, [(adapter, 0.5)]).tensors[WHOLE].f32(), 3)
    assert np.allclose(np.linalg.norm(q, axis=1), changes[of_module("q")].magnitude.f32(), atol=1e-5)
    plain = changes[of_module("k")]
    assert np.allclose(old_k, base[n // 3:2 * n // 3] + 0.5 * FACTOR * plain.b.f32() @ plain.a.f32(), atol=1e-5)
    assert np.array_equal(v, base[2 * n // 3:])
    ids, whole = [5, 8, 13, 21], merged(found, spec, [(adapter, 0.5)])
    with closing(Program(built := network.build(spec, whole), WeightSource(built, whole))) as program:
        expected = run(program, ids, "hidden")
    built = adaptable(network.build(spec, found), found)
    with closing(Program(built, WeightSource(built, found))) as program:
        program.set_adapter(1, parts_of(built, found, fitted(adapter, found, spec), 0.5))
        batch = _batch(program, ids, 0)
        batch.adapters = np.ones(1, np.int32)
        assert relative_error(program.run(batch, entry="main", output="hidden"), expected) < 1e-5


def test_changes_of_experts_in_a_stack_of_all():
    case = load_case("qwen3_5_moe")
    shapes = {name: shape for name, shape in case.tensors.items() if ".experts." not in name}
    n, k = 2 * case.tensors["model.layers.0.mlp.experts.0.up_proj.weight"][0], case.configs[0]["hidden_size"]
    experts = sum(".experts." in name for name in case.tensors) // (3 * case.configs[0]["num_hidden_layers"])
    for layer in range(case.configs[0]["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts."
        shapes |= {f"{at}gate_up_proj": (experts, n, k), f"{at}down_proj": (experts, k, n // 2)}
    found = memory_checkpoint(case.configs[0], shapes)
    spec, stack, down = network.choose_spec(found), f"{at}gate_up_proj", f"{at}down_proj"
    changes = {f"{at}2.up_proj.weight": low_rank("up", (n // 2, k)),
               f"{at}2.gate_proj.weight": low_rank("g", (n // 2, k)),
               f"{at}0.up_proj.weight": low_rank("other", (n // 2, k)),
               f"{at}1.down_proj.weight": low_rank("down", (k, n // 2))}
    some = merged(found, spec, [(Adapter(PATH, "hf", changes), 1.0)]).tensors
    expected = {name: found.tensors[name].f32().astype(np.float64) for name in (stack, down)}

    def more(name):
        return FACTOR * changes[f"{at}{name}.weight"].b.f32() @ changes[f"{at}{name}.weight"].a.f32()

    expected[stack][2, n // 2:] += more("2.up_proj")
    expected[stack][2, :n // 2] += more("2.gate_proj")
    expected[stack][0, n // 2:] += more("0.up_proj")
    expected[down][1] += more("1.down_proj")
    assert all(np.allclose(some[name].f32(), expected[name], atol=1e-5) for name in expected)


@pytest.mark.parametrize("adapter, words", [
    (Adapter(PATH, "hf", {of_module("q"): low_rank("x", (16, 32))}), "is for 16 rows"),
    (Adapter(PATH, "hf", {of_module("q"): low_rank("x", (32, 16))}), "has 16 columns"),
    (Adapter(PATH, "hf", {of_module("q"): low_rank("x", (32, 32)), WHOLE: low_rank("w", (96, 32))}), "twice"),
    (Adapter(PATH, "hf", {of_module("q"): low_rank("x", (32, 32)),
                          f"nomic_bert.{of_module('q')}": low_rank("x", (32, 32))}), "twice"),
    (Adapter(PATH, "hf", {of_module("q"): low_rank("x", (32, 32))},
             replaced={of_module("k"): tensor("x", np.ones((32, 32)))}), "replaces some rows of"),
    (Adapter(PATH, "hf", {}, replaced={of_module("k"): tensor("x", np.ones((32, 16)))}), r"\[32, 16\]")])
def test_what_does_not_fit(adapter, words):
    found, spec = opened("nomic_bert")
    with pytest.raises(FormatError, match=words) as error:
        fitted(adapter, found, spec)
    assert "\n" not in str(error.value)


def test_how_rows_lie_together():
    found, spec = opened("gpt_oss")
    assert rows_together(spec, "ffn_gate_up_exps", [2, 2]) == [range(0, 4, 2), range(1, 4, 2)]
    assert rows_together(opened("gte")[1], "ffn_gate_up", [2, 3]) == [range(3, 5), range(3)]
    with pytest.raises(SpecError, match="attention.qkv"):
        rows_together(opened("falcon_40b")[1], "attn_qkv", [2, 2, 2])
    assert found.tensors
