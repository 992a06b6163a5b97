"""Training the models of the course: gradients, training texts, and trained networks that numflow runs."""

import random

import numpy as np
import pytest

import numflow
from numflow.learn.models import batches, german, nets, stories, train
from numflow.learn.models.tape import Tape, Value

SMALL = {
    "dense": nets.Decoder(40, 16, 2, 4, 2, 8, 24), "experts": nets.Mixture(40, 16, 2, 4, 2, 8, 24, experts=4, chosen=2),
    "hybrid": nets.Hybrid(40, 16, 4, 2, 1, 8, 24, state_heads=2, state_size=8),
    "encoder": nets.Encoder(40, 16, 2, 2, 24), "translator": nets.Translator(40, 16, 2, 2, 8, 24)}


def drawn(net):
    """Weights, inputs and targets of a small network, in float64."""
    rng = np.random.default_rng(0)
    weights = train.initial(net, rng)
    for weight in weights.values():
        weight.data = weight.data.astype(np.float64) + rng.normal(0, 0.05, weight.data.shape)
    ids, hidden = rng.integers(0, 40, (2, 7)), np.zeros((2, 7), bool)
    hidden[1, 5:] = True
    inputs = {"causal": (ids,), "masked": (ids, hidden), "pairs": (ids, hidden, rng.integers(0, 40, (2, 6)))}[net.kind]
    targets = rng.integers(0, 40, (2, 6 if net.kind == "pairs" else 7))
    return rng, weights, inputs, targets


def check_derivatives(net, weights, inputs, targets, counts, rng):
    """Compare the gradient of one element of each weight with finite differences of the loss."""
    def loss() -> tuple[Tape, float]:
        tape = Tape()
        return tape, tape.loss(net.logits(tape, weights, *inputs), targets, counts)

    tape, _ = loss()
    tape.backward()
    for key, weight in weights.items():
        at, gradient = tuple(int(rng.integers(0, size)) for size in weight.data.shape), weight.grad
        kept, found = weight.data[at], []
        for step in (1e-5, -1e-5):
            weight.data[at] = kept + step
            found.append(loss()[1])
        weight.data[at] = kept
        assert (found[0] - found[1]) / 2e-5 == pytest.approx(gradient[at], rel=1e-4, abs=2e-6), key


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.thin(2)
def test_derivatives_are_those_of_differences(name):
    net = SMALL[name]
    rng, weights, inputs, targets = drawn(net)
    check_derivatives(net, weights, inputs, targets, rng.random(targets.shape) < 0.7, rng)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.thin(3)
def test_numflow_runs_what_was_trained(name, tmp_path):
    net = SMALL[name]
    weights = {key: Value(w.data.astype(np.float16).astype(np.float32)) for key, w in drawn(net)[1].items()}
    tokenizer = batches.tokenizer_of(net.kind, 40)
    train.write(tmp_path, net, weights, tokenizer, {})
    rng = np.random.default_rng(1)
    ids = rng.integers(4, 40, 9)
    with numflow.load(tmp_path, backend="reference") as model:
        assert model.network.name == net.spec
        if net.kind == "pairs":
            wanted = net.logits(Tape(), weights, ids[None], np.zeros((1, 9), bool), ids[None, :4]).data[0]
            found = model.logits(ids[:4], encoder_ids=ids)
        else:
            more = (np.zeros((1, 9), bool),) if net.kind == "masked" else ()
            wanted, found = net.logits(Tape(), weights, ids[None], *more).data[0], model.logits(ids)
    assert np.abs(found - wanted).max() < 2e-4 * max(1, np.abs(wanted).max())


def test_the_text_keeps_to_itself():
    rng, kinds = random.Random(5), set()
    for _ in range(300):
        text, bits = stories.document(rng)
        assert bits > 3 and "{" not in text and text.isascii()
        kinds.add(stories.USER in text)
    assert kinds == {True, False}
    story = ("Kim had two plums. Leo gave Kim three more. Now Kim had five plums. Kim ate one on the hill, and then "
             "there were")
    assert stories.is_story(f"{story} four plums.") and not stories.is_story(f"{story} three plums.")
    assert not stories.is_story(story.replace("Leo gave Kim", "Leo gave Leo") + " four plums.")


@pytest.mark.parametrize(("noun", "case", "definite", "adjective", "found"), [
    ("dog Hund m", "accusative", True, ("small", "klein"), ("the small dog", "den kleinen Hund")),
    ("dog Hund m", "nominative", False, ("old", "alt"), ("an old dog", "ein alter Hund")),
    ("book Buch n", "accusative", False, ("red", "rot"), ("a red book", "ein rotes Buch")),
    ("lamp Lampe f", "accusative", True, ("new", "neu"), ("the new lamp", "die neue Lampe")),
    ("school Schule f", "dative", True, None, ("the school", "der Schule"))])
def test_german_endings(noun, case, definite, adjective, found):
    assert german.phrase(german.Noun(*noun.split()), case, definite, adjective) == found


def test_pairs_are_sentences():
    rng = random.Random(2)
    for _ in range(200):
        english, translated = german.pair(rng)
        assert english[0].isupper() and translated[0].isupper()
        assert english[-1] == translated[-1] and english[-1] in ".?!"


def test_muon_makes_singular_values_alike():
    x = np.random.default_rng(0).standard_normal((8, 20)) * np.logspace(0, -2, 8)[:, None]
    x = x.astype(np.float32)
    values = np.linalg.svd(train.orthogonal(x), compute_uv=False)
    assert values.max() < 1.3 and values.min() > 0.3 and np.linalg.cond(x) > 50
