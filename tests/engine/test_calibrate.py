"""Statistics of inputs, against those of a run that keeps them all."""

import numpy as np
import pytest

import numflow
from numflow.engine.calibration.collector import Collector
from numflow.engine.quantise.calibrate import calibrate
from numflow.errors import RequestError
from numflow.network import WeightSource, build, choose_spec
from numflow.network.quantise.quantise import matrices
from numflow.ops import Buffer, Network, Part, Step, View, Weight
from numflow.reference.program import Program
from tests.engine.published import write_case
from tests.engine.translators import write_translator
from tests.quant.small import TEXT, write_model
from tests.specs.case import load_case, memory_checkpoint, run


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


def test_against_inputs_kept_whole(source):
    found = calibrate(source, TEXT, 32, 3)
    kept = {}

    def keep(step, inputs):
        if step.op == "linear":
            kept.setdefault(step.label, []).append(inputs[0].copy())

    with numflow.load(source, backend="reference") as model:
        ids = model.tokenizer.encode(TEXT)
        model.program.observer = keep
        hidden = np.concatenate([model.hidden(ids[i:i + 32]) for i in (0, 32, 64)])
    down = np.concatenate(kept["blk.1.ffn_down"])
    name = "model.layers.1.mlp.down_proj.weight"
    assert down.shape == (96, 96)
    np.testing.assert_allclose(found.importance(name), np.mean(down ** 2, axis=0), rtol=1e-4)
    np.testing.assert_allclose(found.moment(name), down.T @ down / 96, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.importance("lm_head.weight"), np.mean(hidden ** 2, axis=0), rtol=1e-4)
    q, k, gate, up = (f"model.layers.0.{n}_proj.weight" for n in ("self_attn.q", "self_attn.k", "mlp.gate", "mlp.up"))
    assert found.moment(q) is found.moment(k) and found.moment(gate) is found.moment(up)
    assert found.moment(q) is not found.moment(gate)
    assert found.facts["tokens"] == 96 and [len(s) for s in found.facts["sample"]] == [32, 32]
    assert not calibrate(source, TEXT, 32, 1, moments=False).moments


def test_experts_are_counted_apart():
    weight = Weight("w", (6, 4), (Part("stack"),), groups=3)
    views = View("x", 0, 4), View("ids", 0, 2)
    step = Step("expert_linear", views, (View("y", 0, 2),), {"weight": "w"})
    network = Network("n", {"main": (step,)}, {b: Buffer(b, "tokens", 4) for b in "xy"}, {"w": weight}, {}, {}, {})
    collector, x = Collector(network, 8192), np.arange(8, dtype=np.float32).reshape(2, 4)
    collector(step, [x, np.array([[0, 1], [1, 0]], np.int32)])
    found = collector.calibration({})
    both = np.mean(x ** 2, axis=0)
    np.testing.assert_allclose(found.importance("stack"), [both, both, both])  # nobody asked the third
    # The id 3 is of an expert without a matrix, which returns its input.
    collector(step, [np.ones((3, 4), np.float32), np.array([[2], [0], [3]], np.int32)])
    np.testing.assert_allclose(collector.calibration({}).importance("stack")[2], np.ones(4))
    assert not found.moments


@pytest.mark.parametrize("name", ["deepseek_v32", "mistral_large4"])
def test_matrices_that_expand_cached_rows_have_these_rows_as_input(name):
    """Both models also cache keys of an index; the second has layers that read the rows of an earlier layer."""
    case = load_case(name)
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = build(choose_spec(checkpoint), checkpoint, fuse=False)
    program, collector, rows = Program(built, WeightSource(built, checkpoint)), Collector(built, 8192), {}

    def observe(step, inputs):
        collector(step, inputs)
        if step.op == "cache_write" and step.params["cache"].endswith("self"):
            rows[step.params["cache"]] = inputs[0][:, :24].copy()

    program.observer = observe
    run(program, case.inputs[1]["ids"])
    found, expanding = collector.calibration({}), [tensor for tensor in case.tensors if "kv_b" in tensor]
    assert len(expanding) == case.configs[0].get("text_config", case.configs[0])["num_hidden_layers"]
    for layer, tensor in enumerate(expanding):
        cache = f"blk.{layer % 2 if name == 'mistral_large4' else layer}.self"
        np.testing.assert_allclose(found.importance(tensor), np.mean(rows[cache] ** 2, axis=0), rtol=1e-4)


def test_layers_may_choose_unequal_numbers_of_experts():
    case = load_case("hunyuan_v1_moe")
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = build(choose_spec(checkpoint), checkpoint, fuse=False)
    program, collector, hidden = Program(built, WeightSource(built, checkpoint)), Collector(built, 8192), {}
    found = {step.label: step.inputs[1].width for step in built.entries["main"] if step.label.endswith("down_exps")}
    assert sorted(found.values()) == [1, 2, 3]

    def observe(step, inputs):
        collector(step, inputs)
        if step.label in found:
            x, ids = inputs
            hidden[step.label] = [np.mean([x[t * ids.shape[1] + s] ** 2 for t, s in zip(*np.nonzero(ids == expert))],
                                          axis=0) for expert in range(4) if (ids == expert).any()]

    program.observer = observe
    run(program, case.inputs[1]["ids"])
    for layer in range(3):
        tensors = [name for name in case.tensors if f"layers.{layer}." in name and "experts.0.down_proj" in name]
        importance = collector.calibration({}).importance(tensors[0])
        np.testing.assert_allclose(importance, hidden[f"blk.{layer}.ffn_down_exps"][0], rtol=1e-4)


def test_both_halves_of_an_encoder_decoder_are_calibrated(tmp_path):
    found = calibrate(write_translator(tmp_path, ()), "w1 w2 w3 w4 w5 " * 8, 16, 2)
    with numflow.load(tmp_path, backend="reference") as model:
        ids = model.tokenizer.encode("w1 w2 w3 w4 w5 " * 8)
        hidden = np.concatenate([model.hidden(ids[i:i + 16], encoder_ids=ids[i:i + 16]) for i in (0, 16)])
        assert set(matrices(model.network)) == found.importances.keys()
    np.testing.assert_allclose(found.importance("model.shared.weight"), np.mean(hidden ** 2, axis=0), rtol=1e-4)


def test_a_head_of_several_layers_is_calibrated(tmp_path):
    folder, kept = write_case("bert", tmp_path), []
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(
        f"w{i}" for i in range(198))]) + "\n")
    text = "w1 w2 w3 w4 w5 w6 " * 4
    found = calibrate(folder, text, 8, 2)
    with numflow.load(folder, backend="reference") as model:
        assert set(matrices(model.network)) == found.importances.keys()
        ids = model.tokenizer.encode(text)
        model.program.observer = lambda step, inputs: kept.extend(x.copy() for x in inputs[:1])
        model.logits(ids[:8])  # whose last step is the one with the table of tokens
        inputs = [kept[-1]]
        model.logits(ids[8:16])
        inputs.append(kept[-1])
    np.testing.assert_allclose(found.importance("bert.embeddings.word_embeddings.weight"),
                               np.mean(np.concatenate(inputs) ** 2, axis=0), rtol=1e-4)


def test_a_text_that_is_too_short(source):
    with pytest.raises(RequestError, match="at least 2 are needed"):
        calibrate(source, "", 32)
