"""Rotary factors that depend on the length: a request uses one set, independent of other requests."""

import numpy as np
import pytest

import numflow
from numflow.errors import RequestError
from tests.engine.tiny import write_checkpoint

BORDER, PAIRS = 48, 4
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 3.5, 5.0, 9.0]
FACTORS = {"type": "longrope", "original_max_position_embeddings": BORDER, "short_factor": SHORT, "long_factor": LONG,
           "attention_factor": 1.2}
DYNAMIC = {"max_position_embeddings": BORDER, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
TEXT = [4 + (7 * i) % 41 for i in range(120)]
EXECUTORS = {"reference": {"backend": "reference"}, "cpu": {"backend": "cpu", "threads": 2},
             "layers": {"backend": "cpu", "devices": "0;1", "threads": 1},
             "tensors": {"backend": "cpu", "devices": "0&1", "threads": 1},
             "processes": {"backend": "cpu", "devices": "0;1", "transport": "processes", "threads": 1}}


def fixed(factors):
    """A configuration with one set of factors for every length."""
    return {"rope_scaling": FACTORS | {"short_factor": factors, "long_factor": factors},
            "max_position_embeddings": 256}


def stretched(length, border=BORDER):
    """A configuration with the base that transformers computes for a text of this length."""
    dims, factor = 2 * PAIRS, DYNAMIC["rope_scaling"]["factor"]
    base = 10000.0 * (factor * length / border - (factor - 1)) ** (dims / (dims - 2))
    return {"max_position_embeddings": 256, "rope_theta": base}


CONFIGS = {"both": {"rope_scaling": FACTORS, "max_position_embeddings": 256}, "short": fixed(SHORT),
           "long": fixed(LONG), "dynamic": DYNAMIC, "plain": {"max_position_embeddings": 256},
           **{f"stretched {length}": stretched(length) for length in (49, 60, 80)}, "stretched 6": stretched(6, 4),
           "near": {"rope_scaling": FACTORS | {"original_max_position_embeddings": 4}},
           "dynamic near": DYNAMIC | {"max_position_embeddings": 4}}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(name of CONFIGS, options): a model, each made once."""
    made, folder = {}, tmp_path_factory.mktemp("models")

    def get(name, **options):
        options = options or EXECUTORS["reference"]
        key = name, *options.items()
        if key not in made:
            path = write_checkpoint(folder / name.replace(" ", "-"), **CONFIGS[name])
            made[key] = numflow.load(path, **options)
        return made[key]

    yield get
    for model in made.values():
        model.close()


def texts(model, count, **settings):
    """(ids, log-probabilities) of what follows the first `count` tokens of TEXT."""
    found = model.generate(TEXT[:count], ignore_eos=True, logprobs=0, **settings)
    return found.ids, [token.logprob for token in found.logprobs]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.thin(2)
def test_each_text_of_a_batch_has_the_factors_of_its_length(load, executor):
    options = EXECUTORS[executor]
    lengths, exact = (BORDER + 1, 8, BORDER, 60), executor in ("cpu", "layers", "processes")
    wanted = [load("long" if n > BORDER else "short").logits(TEXT[:n]) for n in lengths]
    found = load("both", **options).logits_batch([TEXT[:n] for n in lengths])
    for ours, theirs, n in zip(found, wanted, lengths, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
        if exact:
            np.testing.assert_array_equal(ours, load("both", **options).logits(TEXT[:n]))


@pytest.mark.merge
def test_each_text_of_a_batch_on_the_simulator_has_the_factors_of_its_length(load):
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    for name, wanted in (("near", ("long", "short", "short")), ("dynamic near", ("stretched 6", "plain", "plain"))):
        model = load(name, backend="cuda", gpu="simulator", activations="f32")
        for found, other, n in zip(model.logits_batch([TEXT[:n] for n in (6, 2, 4)]), wanted, (6, 2, 4)):
            np.testing.assert_allclose(found, load(other).logits(TEXT[:n]), atol=2e-4)


@pytest.mark.parametrize("executor", ["reference", "cpu"])
def test_each_text_stretches_the_base_as_far_as_it_reaches(load, executor):
    model, names = load("dynamic", **EXECUTORS[executor]), ("stretched 60", "plain", "plain", "stretched 49")
    for n, name, found in zip((60, BORDER, 5, 49), names, model.logits_batch([TEXT[:n] for n in (60, BORDER, 5, 49)])):
        np.testing.assert_allclose(found, load(name).logits(TEXT[:n]), atol=2e-4)


def test_the_models_own_factors_differ(load):
    """Else nothing above would show anything."""
    short, long = (load(name).logits(TEXT[:40]) for name in ("short", "long"))
    assert np.abs(short - long).max() > 0.1
    assert np.abs(load("plain").logits(TEXT[:49]) - load("stretched 49").logits(TEXT[:49])).max() > 1e-3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_prompt_and_answer_together_choose_from_the_first_token_on(load, backend):
    model, short, long = (load(name, **EXECUTORS[backend]) for name in ("both", "short", "long"))
    for count in (10, BORDER - 1):
        assert texts(model, count, max_tokens=BORDER - count) == texts(short, count, max_tokens=BORDER - count)
        assert texts(model, count, max_tokens=BORDER - count + 1) == texts(long, count, max_tokens=BORDER - count + 1)


@pytest.mark.parametrize("settings", [{"num_beams": 3, "logprobs": None}, {"temperature": 1.0, "seed": 3, "n": 2},
                                      {"speculate": "ngram", "draft_tokens": 4}, {"prompt_logprobs": 0}])
@pytest.mark.thin(2)
def test_every_way_to_decode_has_the_factors_of_the_request(load, settings):
    settings = {"ignore_eos": True, "logprobs": 0} | settings
    for name, count in (("short", BORDER - 20), ("long", BORDER - 19)):
        found, wanted = (load(which).generate(TEXT[:20], max_tokens=count, **settings) for which in ("both", name))
        assert found.ids == wanted.ids
        assert found.logprobs == wanted.logprobs and found.prompt_logprobs == wanted.prompt_logprobs
        assert [one.ids for one in found.choices or []] == [one.ids for one in wanted.choices or []]


def test_a_draft_has_factors_of_its_own(load, tmp_path):
    """Guesses of the same model are all right only if it reads the text with the same factors."""
    model = load("both")
    path = write_checkpoint(tmp_path, **CONFIGS["both"])
    for name, count in (("short", BORDER - 20), ("long", 60)):
        with numflow.load(path, backend="reference", draft=model) as guessed:
            found = guessed.generate(TEXT[:20], max_tokens=count, ignore_eos=True, draft_tokens=4)
        assert found.ids == load(name).generate(TEXT[:20], max_tokens=count, ignore_eos=True).ids
        assert found.stats["acceptance_rate"] == 1


def test_blocks_of_one_set_are_never_used_with_the_other(load):
    """Two full blocks of 16 tokens are kept for each."""
    prompt, model = TEXT[:33], load("both")
    with numflow.Engine(model) as engine:
        def run(count):
            found = engine.submit(prompt, max_tokens=count, ignore_eos=True, logprobs=0).result()
            return found.ids, [token.logprob for token in found.logprobs], found.stats["cached_tokens"]

        short, long = BORDER - len(prompt), 30
        for count, name, cached in ((short, "short", 0), (long, "long", 0), (short, "short", 32), (long, "long", 32),
                                    (long + 9, "long", 32)):
            ids, logprobs = texts(load(name), len(prompt), max_tokens=count)
            assert run(count) == (ids, pytest.approx(logprobs, rel=1e-4), cached)


def test_blocks_of_one_stretched_base_serve_requests_of_the_same_reach(load):
    with numflow.Engine(load("dynamic")) as engine:
        found = [engine.submit(TEXT[:40], max_tokens=count, ignore_eos=True).result().stats["cached_tokens"]
                 for count in (20, 20, 40, 8, 8)]
    assert found == [0, 32, 0, 0, 32]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_requests_of_both_kinds_make_place_for_each_other(load, tmp_path, preemption):
    path, counts = write_checkpoint(tmp_path, **CONFIGS["both"]), [8, 40, 20, 60, 28, 50]
    with numflow.load(path, backend="reference") as model, numflow.Engine(
            model, kv_memory=9 * model.program.block_bytes, preemption=preemption) as engine:
        handles = [engine.submit(TEXT[:20], max_tokens=n, ignore_eos=True, prompt_logprobs=None) for n in counts]
        found = [handle.result().ids for handle in handles]
        assert engine.stats["preemptions"] > 0
    for n, ids in zip(counts, found, strict=True):
        assert ids == load("long" if 20 + n > BORDER else "short").generate(TEXT[:20], n, ignore_eos=True).ids


def test_continuations_of_one_context_have_the_factors_of_their_own_length(load):
    pairs = [(TEXT[:40], TEXT[40:end]) for end in (45, 60, BORDER + 1, BORDER + 2)]
    found = load("both").loglikelihoods(pairs)
    for (context, ids), one in zip(pairs, found, strict=True):  # all but the last token run
        name = "long" if len(context) + len(ids) - 1 > BORDER else "short"
        assert one == pytest.approx(load(name).loglikelihood(context, ids), rel=1e-5)


def test_pieces_of_a_long_text_have_its_factors(load):
    for n, name in ((BORDER, "short"), (100, "long")):
        pieces = [rows for _, rows in load("both").iter_logits(TEXT[:n])]
        np.testing.assert_allclose(np.concatenate(pieces), load(name).logits(TEXT[:n]), atol=1e-5)


def test_a_shorter_context_limits_the_length_alone(load, tmp_path):
    path = write_checkpoint(tmp_path, **CONFIGS["both"])
    for context in (BORDER, 60):
        with numflow.load(path, backend="reference", context=context) as model:
            np.testing.assert_array_equal(model.logits(TEXT[:20]), load("short").logits(TEXT[:20]))
            name = "short" if context == BORDER else "long"
            assert texts(model, 20, max_tokens=None) == texts(load(name), 20, max_tokens=context - 19)
            with pytest.raises(RequestError, match=f"context is {context} tokens"):
                model.logits(TEXT[:context + 1])


def test_positions_that_stretch_reach_as_far_as_the_factor_and_further_on_demand(load, tmp_path):
    assert load("dynamic").context == 4 * BORDER
    path = write_checkpoint(tmp_path, **DYNAMIC)
    for context in (20, 80, 1000):
        with numflow.load(path, backend="reference", context=context) as model:
            assert model.context == context
            if context >= 80:
                np.testing.assert_allclose(model.logits(TEXT[:80]), load("stretched 80").logits(TEXT[:80]), atol=1e-4)
    path = write_checkpoint(tmp_path, **CONFIGS["both"])
    with pytest.raises(RequestError, match=r"context should be 1 \.\. 256 tokens"):
        numflow.load(path, backend="reference", context=257)
