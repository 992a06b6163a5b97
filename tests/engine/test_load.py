"""From files to a running model, on the reference executor, and `bench` over it."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numflow import registry
from numflow.engine import load as load_module
from numflow.engine.load import load
from numflow.engine.measure.bench import bench, host, peak_rss_mib, process_start
from numflow.engine.request.ahead import check_settings
from numflow.engine.tasks.embedding import poolings
from numflow.errors import DeviceError, ModelNotFoundError, RequestError, TokenizerError
from numflow.registry import hub
from tests.conftest import shared
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_a_folder_runs(folder):
    with load(folder, backend="reference") as model:
        assert (model.vocabulary, model.context) == (50, 64)
        logits = model.logits([1, 5, 9])
        assert logits.shape == (3, 50) and np.isfinite(logits).all()
        assert model.generate([1, 5, 9], max_tokens=1, ignore_eos=True).ids == [int(logits[2].argmax())]
        assert model.hidden([1, 5, 9]).shape == (3, 32)
        assert model.load_s > 0


def test_chunks_and_steps_agree(folder):
    ids = list(range(1, 40))
    with load(folder, backend="reference") as whole, load(folder, backend="reference", chunk=7, block_size=4) as parts:
        expected = whole.logits(ids)
        np.testing.assert_allclose(parts.logits(ids), expected, atol=1e-4)
        with parts.runner.open(len(ids)) as sequence:
            steps = np.array([sequence.last(np.array([id], np.int32)) for id in ids])
        np.testing.assert_allclose(steps, expected, atol=1e-4)


def test_ends_come_from_the_configuration(folder):
    with load(folder, backend="reference") as model:
        free = model.generate([1], max_tokens=60, ignore_eos=True).ids
        stopped = model.generate([1], max_tokens=60)
        cut = next((i for i, id in enumerate(free) if id in (2, 3)), None)
        assert stopped.ids == free[:cut]
        assert model._requests._end_ids() == {2, 3}
        with pytest.raises(TokenizerError, match="no tokenizer"):
            model.generate("text")
        assert model.generate([], max_tokens=1).ids == model.generate([1], max_tokens=1).ids


def test_a_shorter_context(folder):
    with load(folder, backend="reference", context=8) as model, pytest.raises(RequestError, match="context is 8"):
        model.logits([1] * 9)
    with pytest.raises(RequestError, match=r"context should be 1 \.\. 64"):
        load(folder, backend="reference", context=65)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"backend": "referense"}, DeviceError, "did you mean 'reference'"),
    ({"activations": "int4"}, RequestError, "activations should be one of int8, int16, auto, bf16, fp8, nvfp4, f32"),
    ({"threads": 0}, RequestError, "threads"), ({"block_sise": 4}, RequestError, "did you mean 'block_size'"),
    ({"spec": "no-such-spec"}, ModelNotFoundError, "no-such-spec")])
def test_bad_options(folder, options, error, message):
    with pytest.raises(error, match=message):
        load(folder, **{"backend": "reference", **options})


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ModelNotFoundError):
        load(tmp_path / "absent.gguf", backend="reference")


def test_only_the_chosen_executor_is_imported(monkeypatch):
    seen = []

    def record(name):
        seen.append(name)
        return SimpleNamespace(Program=name)

    monkeypatch.setattr(load_module, "import_module", record)
    assert load_module._executor("reference") == "numflow.reference.program"
    assert seen == ["numflow.reference.program"]


def test_bench_reports_everything(folder):
    seen = []
    result = bench(folder, prompt_tokens=20, gen_tokens=4, repeat=3, backend="reference", progress=seen.append)
    for rate in ("prefill_tok_s", "decode_tok_s"):
        assert 0 < result[rate]["min"] <= result[rate]["median"] <= result[rate]["max"]
        assert len(result[rate]["samples"]) == 3
    assert 0 < result["load_s"] < result["first_token_s"]
    assert result["weights_bytes"] > (folder / "model.safetensors").stat().st_size * 0.9
    assert seen == ["run 1 of 3", "run 2 of 3", "run 3 of 3"]
    assert json.loads(json.dumps(result)) == result
    assert result["host"]["cores"] >= 1 and result["host"]["numpy"] == np.__version__
    with pytest.raises(RequestError, match="gen_tokens should be at least 2"):
        bench(folder, gen_tokens=1)
    with pytest.raises(RequestError, match="context is 64"):
        bench(folder, prompt_tokens=65, backend="reference")


def test_process_facts(tmp_path):
    start, peak = process_start(), peak_rss_mib()
    assert start is None or 0 < tmp_path.stat().st_mtime - start < 1e6
    assert peak is None or 10 < peak < 1e6
    assert host()["python"].startswith("3.")


FIXTURES = ["llama2", "qwen1.5_0.5b", "gemma_2b", "mistral_7b", "bloomz_3b", "phi_2", "mixtral_8x7b"]


@pytest.mark.parametrize("name", FIXTURES)
def test_published_logits_step_by_step(name):
    """The engine's part: greedy ids, and logits of a prompt cut into small chunks."""
    path = shared("fixtures", name)
    case, expected = json.loads((path / "case.json").read_text()), np.load(path / "expected.npz")
    with load(path, backend="reference", chunk=5) as model:
        for i, prompt in enumerate(case["prompts"]):
            worst = np.abs(model.logits(prompt) - expected[f"logits_{i}"]).max() / expected[f"logits_{i}"].std()
            assert worst < 1e-4
            assert model.generate(prompt, max_tokens=12, ignore_eos=True).ids == case["greedy"][i]


def test_trace_is_one_step_of_decoding(folder, monkeypatch):
    with load(folder, backend="reference") as model:
        rows = model.trace([1, 2, 3])
        assert [row.op for row in rows] == [step.op for step in model.network.entries["main"]]
        assert rows[-1].shapes.endswith("[1, 50]")
        assert len(model.trace()) == len(rows)
        runs = []
        monkeypatch.setattr(model.runner, "trace", lambda sequence, ids: runs.append(ids) or [
            replace(rows[0], microseconds=[900.0, 3.0, 1.0, 2.0, 80.0, 1.5][len(runs) - 1])])
        assert [row.microseconds for row in model.trace([1, 2, 3])] == [2.0] and len(runs) == 6
        assert model.runner.blocks.used == 0


@pytest.mark.parametrize(("name", "value"), [("host_embeddings", True), ("host_kv_percent", 50.0),
                                             ("collectives", "nccl")])
def test_what_only_gpus_have_is_refused_by_name(folder, name, value):
    with pytest.raises(RequestError, match=rf"{name}=.* is for GPUs \(backend='cuda'\); backend 'reference'"):
        load(folder, backend="reference", **{name: value})


class Refused(Exception):
    """What a test's `before` raises."""


@pytest.fixture
def no_program(monkeypatch):
    """Nothing may be bound: kernels would be compiled."""
    def fail(*arguments, **options):
        raise AssertionError("a program was made")

    monkeypatch.setattr(load_module.network, "WeightSource", fail)


def test_before_comes_before_weights_and_kernels(folder, no_program):
    def before(built, prompts, recipe):
        assert built.facts["vocabulary"] == 50
        with pytest.raises(TokenizerError):
            prompts.check()
        with pytest.raises(RequestError, match="name a pooling, one of cls, max"):
            poolings(built.name, recipe(), None)
        with pytest.raises(RequestError, match="no pooling 'meam'; did you mean 'mean'"):
            poolings(built.name, recipe(), "meam")
        assert poolings(built.name, recipe(), "mean") == ("mean",)
        raise Refused

    for weights in (None, "q8"):
        with pytest.raises(Refused):
            load(folder, weights=weights, before=before)


def test_a_draft_model_is_looked_at_before_kernels(folder, tmp_path, no_program):
    other = write_checkpoint(tmp_path)
    tensors = load_file(other / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:40].copy()
    save_file(tensors, other / "model.safetensors")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    with pytest.raises(RequestError, match="has 40 token ids, llama 50: they need one vocabulary"):
        load(folder, draft=other)


def test_a_draft_model_that_cannot_fit_is_not_fetched(folder, monkeypatch, no_program):
    original = registry.resolve

    def resolve(name, **options):
        assert name == folder, "it was fetched"
        return original(name, **options)

    monkeypatch.setattr(registry, "resolve", resolve)
    with pytest.raises(RequestError, match="the draft model gemma3 has 262144 token ids, llama 50"):
        load(folder, draft="gemma3")
    monkeypatch.setattr(hub, "token_ids", lambda repo, revision, offline: {"org/name": 7}[repo])
    with pytest.raises(RequestError, match="the draft model org/name has 7 token ids"):
        load(folder, draft="org/name")


@pytest.mark.parametrize(("settings", "message"), [
    ({"temperatur": 1}, "did you mean 'temperature'"), ({"temperature": -1}, "temperature should be"),
    ({"speculate": "draft"}, "name one with draft"),
    ({"regex": "a("}, "regex: "), ({"json_schema": "{"}, "json_schema: "),
    ({"grammar": "start: ("}, "grammar: ")])
def test_settings_are_checked_without_a_model(settings, message):
    pytest.importorskip("llguidance")
    with pytest.raises(RequestError, match=message):
        check_settings(settings, has_draft=False)
    check_settings({"regex": "a+", "temperature": 0.5, "speculate": "draft"}, has_draft=True)


def test_a_missing_package_is_said_without_a_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(DeviceError, match="structured output needs llguidance"):
        check_settings({"regex": "a+"}, has_draft=False)
