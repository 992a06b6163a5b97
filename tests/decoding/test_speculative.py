"""Speculative decoding is exact: tokens are distributed as without drafts."""

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
@pytest.mark.thin(4)
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
@pytest.mark.thin(3)
def test_the_distribution_by_integrals(p, q):
    """Sum over all drafts and a fine grid of random numbers, without sampling."""
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
    """A language of five words: the logits of the next word depend on the last two."""
    return np.random.default_rng([3, *ids[-2:]]).normal(0, 1.5, 5).astype(np.float32)


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3}, {"fsd": True},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.5}, {"temperature": 1.0, "fsd": "random"}])
@pytest.mark.thin(3)
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


@pytest.mark.merge
def test_rejection_in_a_chain_of_strategies():
    """Three tokens sampled with drafts of a flatter model, against the probabilities of all 125 texts."""
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


def known(seconds, most=8):
    """Times of rounds with 0 to `most` drafts."""
    times = StepTimes()
    for drafts in range(most + 1):
        for each in (9.0, seconds(drafts), seconds(drafts), 5.0):  # long rounds change nothing
            times.observe(drafts, each)
    return times


def test_the_length_follows_success():
    length, times = DraftLength(8), known(lambda drafts: 1 + 0.25 * drafts)
    for _ in range(30):
        length.update(4, 4)
    assert (length.rate, length.choose(times)) == (pytest.approx(1, abs=0.02), 8)
    for _ in range(60):
        length.update(4, 0)
    assert length.rate < 0.05
    chosen = [length.choose(times) for _ in range(256 + 512 + 40)]
    assert set(chosen) == {0, 1} and [at for at, drafts in enumerate(chosen) if drafts] == [256, 257, 770, 771]
    for _ in range(60):
        length.update(3, 1)
    assert length.rate == pytest.approx(0.5, abs=0.02)
    speeds = [sum(0.5**i for i in range(k + 1)) / (1 + 0.25 * k) for k in range(9)]
    assert DraftLength(8, length.rate).choose(times) == int(np.argmax(speeds))


def test_rounds_of_both_kinds_are_measured_first():
    length, times, chosen = DraftLength(8), StepTimes(), []
    for _ in range(5):
        chosen.append(length.choose(times))
        times.observe(chosen[-1], 1 + chosen[-1])
    assert chosen[:4] == [0, 0, 2, 2] and chosen[4] == 0  # 2.2 tokens for the time of three


def test_numbers_that_were_never_run_lie_on_a_line():
    times = StepTimes()
    times.observe(0, 0.010)
    times.observe(4, 0.030)
    times.observe(6, 0.060)
    line = [0.010, 0.015, 0.020, 0.025, 0.030, 0.045, 0.060, 0.060 + 0.050 / 6, 0.060 + 0.100 / 6]
    assert times.estimates(8) == pytest.approx(line)
    assert times.estimates(3) == pytest.approx(line[:4])
    times.observe(6, 0.005)  # more rows take no less
    assert times.estimates(8)[4:] == pytest.approx([0.030, 0.030, 0.005, 0.005, 0.005])


class Text:
    """A text that drafts."""


class Clock:
    """Clock set by a test."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def written(rounds, right, plain=1.0, draft=0.8, row=0.3, catch_up=0.0, times=None, clock=None, text=None):
    """Tokens and seconds of so many rounds of a text; `right(n)`: whether the n-th draft is accepted."""
    clock = clock or Clock()
    times, text = times or StepTimes(clock), text or Text()
    length, tokens, drafted, begin, behind = DraftLength(16), 0, 0, clock.now, 0
    counts = []
    for _ in range(rounds):
        times.enter(text)
        count = length.choose(times)
        counts.append(count)
        clock.now += count * draft + (catch_up * behind if count else 0) + plain + count * row
        behind = 0 if count else behind + 1
        passed = 0
        while passed < count and right(drafted + passed):
            passed += 1
        drafted += count
        times.ended(count)
        length.update(count, passed)
        tokens += 1 + passed
    times.leave(text)
    return tokens, clock.now - begin, counts


def test_drafts_that_do_not_pay_stop_within_a_few_rounds_and_cost_next_to_nothing():
    """A small model: a draft takes nearly as long as a step. Also where a draft catches up with all tokens since."""
    for catch_up in (0.0, 0.02):
        for often in (0.0, 0.5, 0.8):
            luck = (np.random.default_rng(0).random(100) < often).tolist()
            tokens, seconds, counts = written(2000, luck.__getitem__, catch_up=catch_up)
            assert sum(map(bool, counts[:12])) <= 3 and sum(map(bool, counts)) <= 14
            assert tokens / seconds > 0.97  # plain: one a second


def test_a_text_of_64_tokens_loses_little_and_the_next_ones_nothing():
    clock = Clock()
    times, speeds = StepTimes(clock), []
    for _ in range(6):
        luck = (np.random.default_rng(1).random(100) < 0.8).tolist()
        tokens, seconds, _ = written(60, luck.__getitem__, times=times, clock=clock)
        speeds.append(tokens / seconds)
    assert min(speeds) > 0.95 and np.mean(speeds[1:]) > 0.97


def test_drafts_that_pay_go_on_and_come_back():
    rng = np.random.default_rng(0)
    tokens, seconds, counts = written(400, lambda n: rng.random() < 0.8, draft=0.1, row=0.05)
    assert tokens / seconds > 1.9 and 0 not in counts[4:]
    clock = Clock()
    times, luck = StepTimes(clock), np.random.default_rng(0)
    text = Text()
    written(300, lambda n: False, draft=0.1, row=0.05, times=times, clock=clock, text=text)
    tokens, seconds, counts = written(600, lambda n: luck.random() < 0.8, draft=0.1, row=0.05, times=times, clock=clock,
                                      text=text)
    assert tokens / seconds > 1.5  # a text of another kind


def test_rounds_that_became_dearer_stop_drafts():
    clock = Clock()
    times = StepTimes(clock)
    written(100, lambda n: n % 5 != 4, draft=0.1, row=0.05, times=times, clock=clock)
    *_, counts = written(400, lambda n: n % 5 != 4, draft=2.0, row=0.5, times=times, clock=clock)
    assert not any(counts[60:100]), counts


def test_texts_side_by_side_are_measured_apart():
    """With several texts, drafts are no longer free: their rows fill the batch."""
    clock = Clock()
    times, texts = StepTimes(clock), [Text() for _ in range(8)]
    for row, drafts in ((0.2, False), (0.001, True)):
        times, lengths = StepTimes(clock), [DraftLength(8) for _ in texts]
        for at in range(20):
            for text in texts:
                times.enter(text)
            counts = [length.choose(times) for length in lengths]
            clock.now += 1 + row * sum(counts)
            for count in counts:
                times.ended(count)
            assert at < 4 or any(counts) == drafts
    for text in texts[1:]:
        times.leave(text)
    assert times.to_measure() == 0  # alone again, what was seen in company tells nothing


def test_a_dear_step_is_avoided():
    """Four rows fit into one tile of the kernels; a fifth row costs as much as all four."""
    times = known(lambda drafts: 1.0 if drafts < 4 else 2.0)
    assert DraftLength(8, rate=0.8).choose(times) == 3
