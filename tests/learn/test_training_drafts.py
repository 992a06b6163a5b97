"""Draft blocks for the course's models: gradients, the network that numflow runs, and how many drafts are accepted."""

import json

import numpy as np
import pytest

import numflow
from numflow.learn.models import batches, drafts, nets, train
from numflow.learn.models.tape import Tape
from tests.learn.test_training import check_derivatives

BASES = {"mtp": nets.Hybrid(40, 16, 4, 2, 1, 8, 24, state_heads=2, state_size=8),
         "eagle": nets.Decoder(40, 16, 4, 4, 2, 8, 24)}
KINDS = {"mtp": (drafts.Further, np.arange(40)), "eagle": (drafts.Streams, np.arange(3, 40, 2))}
# Model, its draft, and the beginnings of a story and of an answer as in its training texts.
TRAINED = {"mtp": ("tiny-hybrid", "mtp"), "eagle": ("tiny", "tiny-eagle")}
PROMPTS = ("One morning Kim found a red kite", "Why is the sky blue?", "Once upon a time there was a cat who lived")


def drawn(net, rng, dtype):
    """Random weights of a network, none of them at a point where a gradient is 0."""
    weights = train.initial(net, rng)
    for weight in weights.values():
        weight.data = (weight.data + rng.normal(0, 0.05, weight.data.shape)).astype(dtype)
    return weights


def block(name, dtype):
    """A draft block for a model of random weights, and the block's own random weights."""
    rng, (kind, words) = np.random.default_rng(0), KINDS[name]
    net = kind(BASES[name], drawn(BASES[name], rng, dtype), words)
    return net, drawn(net, rng, dtype)


@pytest.mark.parametrize("name", KINDS)
def test_derivatives_are_those_of_differences(name):
    net, weights = block(name, np.float64)
    rng = np.random.default_rng(1)
    batch = net.training_batch(rng.integers(0, 40, (2, 7)))
    assert batch["targets"].shape == (2, 3 * 6, len(net.words)) and batch["counts"].sum() == 2 * (6 + 5 + 4)
    check_derivatives(net, weights, batch["inputs"], batch["targets"], batch["counts"], rng)


@pytest.mark.parametrize("name", KINDS)
def test_numflow_runs_what_was_trained(name, tmp_path):
    """Three drafts after a text, each from the block's previous hidden state, as in the three passes of training."""
    net, weights = block(name, np.float16)
    for value in (*weights.values(), *net.fixed.values()):
        value.data = value.data.astype(np.float32)
    folder, draft = tmp_path / "model", "mtp" if name == "mtp" else tmp_path / "draft"
    train.write(folder, net.base, net.fixed, batches.tokenizer_of("causal", 40), {})
    train.write(folder if draft == "mtp" else draft, net, weights, None, {})
    ids, begin = np.random.default_rng(1).integers(3, 40, 12).astype(np.int32), 8
    wanted = net.logits(Tape(), weights, *net.training_batch(ids[None])["inputs"]).data.reshape(3, len(ids) - 1, -1)
    with numflow.load(folder, backend="reference", draft=draft) as model:
        model.logits(ids)
        request, streams = model.request(ids[:begin], {"max_tokens": 4}), model.program.result("streams")
        drafter = model.core.drafters.make(request, request.sampler())
        drafter.observe(0, ids[:1], streams[:begin])
        found = [drafter._run_text(ids[:begin]), drafter._run(ids[begin:begin + 1]),
                 drafter._run(ids[begin + 1:begin + 2])]
        drafter.close()
    for number, logits in enumerate(found):
        row = wanted[number, begin - 2 + number]
        assert np.abs(logits[net.words] - row).max() < 2e-4 * max(1, np.abs(row).max())
        assert np.isneginf(np.delete(logits, net.words)).all()


@pytest.mark.parametrize("name", KINDS)
def test_a_block_learns_what_its_model_says(name):
    """The loss falls in a few steps; the base model's weights do not change."""
    net, _ = block(name, np.float32)
    before = {key: value.data.copy() for key, value in net.fixed.items()}
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 40, (4, 24)) for _ in range(4)]
    data = (net.training_batch(texts[i % 4]) for i in range(100))
    _, losses = train.train(net, data, 40, 0.01, log=lambda *_, **__: None)
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.01
    assert all(np.array_equal(value.data, before[key]) for key, value in net.fixed.items())


@pytest.mark.slow
def test_a_trained_model_gets_its_block(tmp_path):
    """The training command, for two steps: the model's tensors are unchanged, the block's tensors are added."""
    from safetensors.numpy import load_file

    facts = train.make("tiny-mtp", steps=2, documents=400, out=tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (train.TRAINED / "tiny-hybrid", tmp_path))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) != key.startswith("mtp.") for key in before)
    assert json.loads((tmp_path / "training.json").read_text())["draft"] == facts and facts["steps"] == 2


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.merge
def test_drafts_of_trained_blocks_are_right(name):
    model_name, draft = TRAINED[name]
    with numflow.load(model_name, backend="reference", draft=draft) as model:
        for count, least in ((1, 0.5), (3, 0.4)):
            before = dict(model.core.counts)
            for prompt in PROMPTS:
                how = {"max_tokens": 32, "chat": prompt.endswith("?"), "temperature": 0}
                plain = model.generate(prompt, speculate="off", **how)
                assert model.generate(prompt, draft_tokens=count, **how).ids == plain.ids
            tried, right = (model.core.counts[key] - before[key] for key in ("drafts", "accepted_drafts"))
            assert tried > 20 and right / tried > least
