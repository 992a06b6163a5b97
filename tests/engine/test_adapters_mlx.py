"""Adapters of mlx-lm: its logits, experts in a stack, and adapters that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import numflow
from numflow.errors import FormatError, ModelNotFoundError
from numflow.formats.adapter import open_adapter
from numflow.network import choose_spec
from numflow.network.adapters.fit import fitted
from tests.engine.make_mlx_adapters import IDS, KINDS, STEP, matrices, write_mlx_adapter
from tests.server.tiny import write_chat_model
from tests.specs.case import load_case, memory_checkpoint

EXPECTED = json.loads((Path(__file__).parent / "expected" / "mlx_adapters.json").read_text(encoding="utf-8"))
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_results_are_those_of_mlx_lm(base, tmp_path, backend):
    adapters = {kind: write_mlx_adapter(tmp_path / kind, kind) for kind in KINDS}
    with numflow.load(base, backend, activations="f32", adapters=adapters) as model:
        found = {kind: model.logits(IDS, adapter=kind) for kind in KINDS}
    with numflow.load(base, backend, activations="f32", adapters=adapters, merge="lora") as model:
        found["merged"] = model.logits(IDS)
    for name, rows in found.items():
        wanted = np.array(EXPECTED.get(name, EXPECTED["lora"]))
        assert np.abs(rows[:, ::STEP] - wanted).max() < 1e-4 * wanted.std()


def test_experts_and_names_of_kimi_linear(tmp_path):
    """Stacks of experts, under mlx-lm's names, for a published checkpoint."""
    case, rng = load_case("kimi_linear"), np.random.default_rng(0)
    base = memory_checkpoint(case.configs[0], case.tensors)
    stem, stored = "model.layers.1.mlp.switch_mlp.up_proj", "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    n, k = case.tensors[stored.format(0)]
    experts = sum(stored.format(expert) in case.tensors for expert in range(99))
    tensors = {f"{stem}.lora_a": rng.standard_normal((experts, 4, k), np.float32),
               f"{stem}.lora_b": rng.standard_normal((experts, n, 4), np.float32)}
    adapter = open_adapter(write_mlx_adapter(tmp_path, "lora", tensors))
    added = fitted(adapter, base, choose_spec(base)).adapter.added
    assert [*added] == [stored.format(expert) for expert in range(experts)]
    for change, a, b in zip(added.values(), *tensors.values(), strict=True):
        assert change.factor == 1.5 and all(map(np.array_equal, change.matrices(), (a, b)))


@pytest.mark.parametrize("kind, settings, change, words", [
    ("full", {}, {}, "fine_tune_type: expected 'lora' or 'dora', found 'full'"),
    ("lora", {"scale": "2"}, {}, "lora_parameters.scale: expected a number, found '2'"),
    ("lora", {"alpha": 16}, {}, "lora_parameters.alpha is set"),
    ("lora", {}, {f"{Q}.weight": np.zeros((2, 2))}, "expected a name that ends in .lora_a, .lora_b, .m"),
    ("lora", {}, {f"{Q}.lora_b": np.zeros((3, 32))}, "has rank 4"),
    ("lora", {}, {f"{Q}.lora_b": np.zeros((2, 4, 32))}, "should be"),
    ("lora", {}, {f"{Q}.m": np.zeros(31)}, r"m \[31\] should have 32 numbers"),
    ("lora", {}, {"x.lora_a": np.zeros((32, 4))}, "matrix B of the pair is missing"),
    ("lora", {}, {"x.switch_mlp.up_proj.lora_a": np.zeros((2, 4, 3)), "x.switch_mlp.up_proj.lora_b": np.zeros(
        (2, 3, 4)), "x.switch_mlp.up_proj.m": np.zeros(3)}, "no magnitude of experts")])
def test_what_is_refused(tmp_path, kind, settings, change, words):
    tensors = matrices("lora") | {name: values.astype(np.float32) for name, values in change.items()}
    with pytest.raises(FormatError, match=words):
        open_adapter(write_mlx_adapter(tmp_path, kind, tensors, **settings))


def test_files_that_are_missing(tmp_path):
    with pytest.raises(FormatError, match="an adapter without tensors"):
        open_adapter(write_mlx_adapter(tmp_path, "lora", {}))
    (tmp_path / "adapters.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="of mlx-lm, but no adapters.safetensors beside it"):
        open_adapter(tmp_path)
