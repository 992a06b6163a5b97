"""Speculation is exact: what passes is distributed as if nobody had drafted."""

import itertools

import numpy as np
import pytest

from numflow.decoding.lookup import lookup
from numflow.decoding.sampler import Sampler
from numflow.decoding.select import draw
from numflow.decoding.settings import Sampling
from numflow.decoding.speculative import Distribution, DraftLength, StepTimes, verify
from numflow.learn.cases.chance import chi_square, limit


def distribution(p):
    p = np.array(p, float)
    ids = np.flatnonzero(p)
    return Distribution(ids, p[ids] / p.sum())


PAIRS = [([0.1, 0.4, 0.05, 0.25, 0.2], [0.3, 0.1, 0.2, 0.2, 0.2]), ([0.5, 0.5, 0, 0, 0], [0, 0.1, 0.9, 0, 0]),
         ([0.2] * 5, [1, 0, 0, 0, 0]), ([1, 0, 0, 0, 0], [0.2] * 5), ([0.6, 0.1, 0.3, 0, 0], [0.6, 0.1, 0.3, 0, 0]),
         ([0, 0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0, 0])]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_the_distribution_is_that_of_the_model(p, q):
    rng, draws = np.random.default_rng(1), 10000
    target, source = distribution(p), distribution(q)
    counts, passed = np.zeros(5), 0
    for uniform in rng.random((draws, 3)):
        draft = draw(source.ids, source.probabilities, uniform[0])
        id = verify(target, draft, source, uniform[1], uniform[2])
        counts[id] += 1
        passed += id == draft
    found, freedom = chi_square(counts, p)
    assert found < limit(max(freedom, 1))
    assert passed / draws == pytest.approx(np.minimum(p, q).sum(), abs=0.02)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_the_distribution_by_integrals(p, q):
    """Summed over all drafts and a fine grid of random numbers, without drawing anything."""
    target, source, grid = distribution(p), distribution(q), (np.arange(60) + 0.5) / 60
    found = np.zeros(5)
    for draft, weight in zip(*source, strict=True):
        for accept, other in itertools.product(grid, grid):
            found[verify(target, int(draft), source, accept, other)] += weight / 3600
    np.testing.assert_allclose(found, p, atol=0.02)


def test_a_check_of_the_check():
    counts = np.random.default_rng(0).multinomial(20000, [0.11, 0.39, 0.05, 0.25, 0.2])
    found, freedom = chi_square(counts, PAIRS[0][0])
    assert found > limit(freedom)


def logits_after(ids):
    """A language of five words: the next one's logits follow from the last two."""
    return np.random.default_rng([3, *ids[-2:]]).normal(0, 1.5, 5).astype(np.float32)


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3}, {"fsd": True},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.5}, {"temperature": 1.0, "fsd": "random"}])
def test_compared_guesses_change_no_token(settings):
    for seed in range(20):
        plain = Sampler(Sampling(seed=seed, **settings), prefix=[0, 1])
        for _ in range(30):
            plain.pick(logits_after(plain.ids))
        drafting, rng = Sampler(Sampling(seed=seed, **settings), prefix=[0, 1]), np.random.default_rng(seed)
        while drafting.new < 30:
            drafts = rng.integers(0, 5, 4)
            for draft in drafts:  # as numflow.engine.run.search does
                if drafting.pick(logits_after(drafting.ids)) != draft or drafting.new == 30:
                    break
        np.testing.assert_array_equal(plain.ids, drafting.ids)


def test_rejection_in_a_chain_of_strategies():
    """Three tokens drawn with drafts from a model that is too flat, against the probabilities of all 125 texts."""
    settings = {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.2}
    exact = np.zeros((5, 5, 5))
    for text in itertools.product(range(5), repeat=3):
        sampler, weight = Sampler(Sampling(seed=0, **settings), prefix=[0, 1]), 1.0
        for id in text:
            weight *= Distribution(*sampler.distribution(logits_after(sampler.ids))).of(np.array([id]))[0]
            sampler.accept(id)
        exact[text] = weight
    assert exact.sum() == pytest.approx(1)
    counts, passed, draws = np.zeros((5, 5, 5)), 0, 2000
    for seed in range(draws):
        sampler = Sampler(Sampling(seed=seed, **settings), prefix=[0, 1])
        drafter = Sampler(Sampling(seed=seed, temperature=1.0), prefix=[0, 1], index=1)
        while sampler.new < 3:
            row = logits_after(sampler.ids)
            q = Distribution(*drafter.distribution(0.5 * row))
            draft = draw(*q, drafter.uniform())
            id = sampler.check(row, draft, q)
            drafter.accept(id)
            passed += id == draft
        counts[tuple(sampler.ids[2:])] += 1
    found, freedom = chi_square(counts, exact)
    assert found < limit(freedom)
    assert passed > draws


@pytest.mark.parametrize(("text", "count", "expected"), [
    ([1, 2, 3, 4, 1, 2], 2, [3, 4]), ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]), ([1, 2, 3], 2, []), ([], 3, []),
    ([1], 3, []), ([4, 4], 3, [4, 4, 4]), ([4, 4, 4], 3, [4, 4, 4]), ([5, 1, 2, 6, 2], 2, [6, 2]),
    ([1, 2, 3, 9, 1, 2, 4, 1, 2], 1, [4]),  # the latest
    ([0, 1, 2, 3, 9, 9, 1, 2, 4, 0, 1, 2], 1, [3]),  # three agree
    ([7, 7, 7, 7], 2, [7, 7]), ([5, 6, 8, 5, 6, 9, 5, 6], 3, [9, 5, 6])])
def test_look_up(text, count, expected):
    found, agree = lookup(np.array(text, np.int32), count)
    assert found.tolist() == expected
    runs = [n for n in range(1, 5) if n < len(text) and text[-n:] in [text[i:i + n] for i in range(len(text) - n)]]
    assert agree == max(runs, default=0)


def test_the_length_follows_success():
    length, times = DraftLength(8), StepTimes()
    for drafts in range(9):
        for seconds in (9.0, 1 + 0.05 * drafts, 1 + 0.05 * drafts, 5.0):  # long steps change nothing
            times.observe(drafts, seconds)
    for _ in range(30):
        length.update(4, 4)
    assert (length.rate, length.choose(times, 0.2)) == (pytest.approx(1, abs=0.02), 8)
    for _ in range(60):
        length.update(4, 0)
    assert length.rate < 0.05
    chosen = [length.choose(times, 0.2) for _ in range(64)]
    assert set(chosen) == {0, 1} and sum(chosen) == 4
    for _ in range(60):
        length.update(3, 1)
    assert length.rate == pytest.approx(0.5, abs=0.02)
    speeds = [sum(0.5**i for i in range(k + 1)) / (1 + 0.25 * k) for k in range(9)]
    assert length.choose(times, 0.2) == int(np.argmax(speeds))


def test_steps_that_were_never_run_are_estimated():
    times = StepTimes()
    assert [times.estimate(k) for k in (0, 3, 5)] == pytest.approx([1, 1.3, 2])
    times.observe(0, 0.010)
    assert times.estimate(3) == pytest.approx(0.013)
    times.observe(3, 0.026)  # three drafts take twice as long as was assumed, and five will
    assert (times.estimate(5), times.estimate(1)) == (pytest.approx(0.040), pytest.approx(0.011))


def test_texts_side_by_side_guess_less():
    """The rows of all texts fill what one text alone has for nothing."""
    class Text:
        pass

    times, length, texts, chosen = StepTimes(), DraftLength(8, rate=0.7), [Text() for _ in range(8)], []
    for text in texts:
        times.enter(text)
        times.enter(text)
        chosen.append(length.choose(times))
    assert chosen[0] == 3 and chosen[3:] == [0] * 5
    times.observe(0, 1.0)
    times.observe(3, 1.1)  # but where a step with 32 rows takes no longer, all may draft
    assert length.choose(times) >= 2
    for text in texts[1:]:
        times.leave(text)
    del texts[1:]
    assert length.choose(times) == 3  # alone again, what was seen in company tells nothing


def test_a_dear_step_is_avoided():
    """Four rows fit into what the kernels do at once, a fifth costs as much as all of them."""
    length, times = DraftLength(8, rate=0.8), StepTimes()
    for drafts in range(9):
        times.observe(drafts, 1.0 if drafts < 4 else 2.0)
    assert length.choose(times) == 3
