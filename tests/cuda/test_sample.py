"""Sampling on the device gives the tokens that the host's sampler gives for the same logits."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang.kernel import REGISTRY
from numflow.cuda.lang.parameters import Following
from numflow.cuda.sample.sample import FOLLOW, FOLLOW_DRAWN
from numflow.decoding.choice import Choice, draws, encode
from numflow.decoding.constraints import Constraints
from numflow.decoding.sampler import Sampler
from numflow.decoding.select import draw
from numflow.decoding.settings import Sampling
from numflow.decoding.weights import UNIT
from numflow.executor.contract import MOST_STEPS

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

SETTINGS = (
    Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7), Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.8, top_k=5), Sampling(temperature=1.3, min_p=0.1), Sampling(temperature=2.0, top_p=0.05),
    Sampling(temperature=0.9, min_p=0.02, top_k=20, top_p=0.8), Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.5, top_k=12, top_p=0.7, samplers=("temperature", "top_p", "top_k")),
)


def on_device(kernel, logits, settings=None, seed=0):
    """The ids that a kernel samples from rows of logits, int32 [R]."""
    device, (rows, width) = Simulated(seed=seed), logits.shape
    stride = -(-width // 32) * 32
    padded = np.full((rows, stride), np.nan, np.float32)
    padded[:, :width] = logits
    memory = [device.alloc(array.nbytes) for array in (np.zeros(rows, np.int32), padded)]
    counts = device.alloc(64)
    device.upload(memory[1].at(), padded)
    device.upload(counts.at(), np.array([0, rows, 0, 0], np.int32))
    more = []
    if settings is not None:
        more = [device.alloc(settings.nbytes).at()]
        device.upload(more[0], settings)
    device.launch(Launch(REGISTRY[kernel], (rows, 1, 1), (memory[0].at(), memory[1].at(), stride, *more, counts.at(),
                                                          width)))
    return device.download(memory[0].at(), 4 * rows).view(np.int32)


@pytest.mark.parametrize("drawn", [False, True])
def test_picked_tokens_are_the_next_step(drawn):
    """Three steps of two sequences whose logit rows are in reverse order; the second row is not finite."""
    device, width = Simulated(seed=3), 70
    logits = np.random.default_rng(2).normal(0, 1, (2, 96)).astype(np.float32)
    logits[1, 5] = np.nan
    choices = [Choice(0.8, 0.1, (("top_k", 40),), (0.5, 0.9)), Choice(0.7, 0.5, (), (0.5, 0.5))]
    arrays = {"ids": np.full(2 * MOST_STEPS, -7), "draws": draws(choices, 3, MOST_STEPS).reshape(-1).view(np.int32),
              "steps": np.zeros(2), "rows": np.array([1, 0]),
              "tokens": np.array([8, 9]), "positions": np.array([20, 30]), "sequence_of": np.array([0, 1]),
              "lengths": np.array([21, 31])}
    memory = {name: device.alloc(4 * len(array)) for name, array in arrays.items()}
    for name, array in arrays.items():
        device.upload(memory[name].at(), array.astype(np.int32))
    rows, counts = device.alloc(logits.nbytes), device.alloc(64)
    device.upload(rows.at(), logits)
    device.upload(counts.at(), np.array([2, 2, 0, 2], np.int32))
    batch = Following(**{name: one.at() for name, one in memory.items()})
    settings = device.alloc(encode(choices).nbytes)
    device.upload(settings.at(), encode(choices))
    for _ in range(3):
        device.launch(Launch(FOLLOW_DRAWN if drawn else FOLLOW, (4, 1, 1), (
            batch, rows.at(), 96, *([settings.at()] if drawn else []), counts.at(), width)))
    found = {name: device.download(one.at(), 4 * len(arrays[name])).view(np.int32).tolist()
             for name, one in memory.items()}
    row = logits[0, :width]
    picked = [int(row.argmax())] * 3 if not drawn else [picked_by_host(row, choices[0]._replace(uniform=at))
                                                        for at in (0.1, 0.5, 0.9)]
    assert len(set(picked)) == (3 if drawn else 1)
    assert found["ids"] == [*picked, *[-7] * 5, *[-1] * 3, *[-7] * 5] and found["steps"] == [3, 3]
    assert found["tokens"] == [0, picked[-1]] and found["positions"] == [23, 33] and found["lengths"] == [24, 34]


def picked_by_host(row, choice):
    """The token that the host's sampler gives with a choice's random number."""
    sampler = Sampler(Sampling(temperature=choice.temperature, **dict(choice.filters)))
    c = sampler.candidates(row)
    return draw(c.ids, c.weights, choice.uniform)


def check(logits, settings=SETTINGS, seed=1):
    """Compare device and host for a row of logits under each of the settings, with different random numbers."""
    samplers = [Sampler(replace(one, seed=100 + at)) for at, one in enumerate(settings)]
    choices = [sampler.choice() for sampler in samplers]
    rows = np.broadcast_to(logits, (len(settings), logits.shape[-1]))
    found = on_device("sample", rows, encode(choices), seed)
    assert found.tolist() == [sampler.pick(row) for sampler, row in zip(samplers, rows)]


@pytest.mark.parametrize("width", [1, 33, 700])
@pytest.mark.merge
def test_the_same_tokens_as_on_the_host(width):
    check(np.random.default_rng(width).normal(0, 3, width).astype(np.float32), seed=width)


@pytest.mark.slow
def test_a_vocabulary_in_several_pieces():
    check(np.random.default_rng(5).normal(0, 2, 5001).astype(np.float32), SETTINGS[3:9:2])


@pytest.mark.merge
def test_equal_logits():
    """The border is among equal logits, more of them than the list has slots."""
    rng = np.random.default_rng(3)
    check(np.round(rng.normal(0, 1, 200)).astype(np.float32), SETTINGS[3:8])
    many = Sampling(temperature=1.0, top_k=600), Sampling(temperature=0.5, top_p=0.61, top_k=650)
    check(np.zeros(700, np.float32), many)
    check(np.where(np.arange(700) % 90 == 0, 9, 0).astype(np.float32), many)


def test_unlikely_and_impossible_tokens():
    logits = np.random.default_rng(4).normal(0, 2, 60).astype(np.float32)
    logits[10:40] = -np.inf
    logits[50] = -1e30
    check(logits, SETTINGS[1:8:2])
    check(np.float32(1e4) * logits, SETTINGS[3:5])


def test_draws_follow_the_probabilities():
    """Random numbers at the borders of the cumulative probabilities give each of the tokens."""
    logits = np.log(np.array([0.125, 0.5, 0.0625, 0.3125], np.float32))
    at = [0.0, 0.12, 0.13, 0.62, 0.63, 0.68, 0.69, 0.9999999]
    settings = encode([Choice(1.0, uniform) for uniform in at])
    assert on_device("sample", np.tile(logits, (len(at), 1)), settings).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.merge
def test_random_numbers_at_the_borders_between_tokens():
    row = np.random.default_rng(7).normal(0, 1.5, 50).astype(np.float32)
    for own in SETTINGS[2:4]:
        choice, c = Sampler(own).choice(), Sampler(own).candidates(row)
        units = np.cumsum(c.weights, dtype=np.float64) / UNIT
        borders = [-(-int(units[at]) * 2**32 // int(units[-1])) for at in range(0, len(units) - 1, len(units) // 3)]
        uniforms = [(border + step) / 2**32 for border in borders for step in (-1, 0)]
        found = on_device("sample", np.tile(row, (len(uniforms), 1)),
                          encode([choice._replace(uniform=uniform) for uniform in uniforms]))
        assert found.tolist() == [draw(c.ids, c.weights, uniform) for uniform in uniforms]
        assert len(set(found.tolist())) > len(borders)


def test_rows_that_are_not_numbers():
    rows = np.zeros((5, 40), np.float32)
    rows[0, 7], rows[1, 8], rows[2], rows[3, 9], rows[4, 39] = np.nan, np.inf, -np.inf, -np.inf, 2
    assert on_device("argmax", rows).tolist() == [-1, -1, -1, 0, 39]
    assert on_device("sample", rows, encode([Choice(1.0, 0.0, (("top_k", 1),))] * 5)).tolist() == [-1, -1, -1, 0, 39]


def test_bits_do_not_depend_on_the_order_of_threads():
    logits = np.random.default_rng(6).normal(0, 1, (1, 300)).astype(np.float32)
    settings = encode([Choice(0.9, 0.77, (("min_p", 0.01), ("top_k", 80), ("top_p", 0.9)))])
    assert len({int(on_device("sample", logits, settings, seed)[0]) for seed in range(3)}) == 1


@pytest.mark.parametrize("settings", [
    {"top_k": 3, "logprobs": 0}, {"repetition_penalty": 1.1}, {"tfs_z": 0.9}, {"typical_p": 0.9}, {"mirostat": 2},
    {"pool_size": 5}, {"fsd": "random"}, {"logit_bias": {3: 1.0}}, {"eos_bypassing_max": 1},
    {"top_p": 0.5, "samplers": ("top_p", "temperature")}], ids=str)
def test_settings_that_need_the_host(settings):
    assert Sampler(Sampling(temperature=0.8, **settings)).choice() is None


def test_constraints_that_need_the_host():
    def ready(new, **constraints):
        sampler = Sampler(Sampling(), Constraints(max_tokens=9, **constraints))
        for id in range(new):
            sampler.accept(id)
        return sampler.choice() is not None, sampler.choice(1) is not None

    assert ready(0) == (True, True)
    assert ready(0, banned=((4,),)) == (False, False)
    assert ready(0, no_repeat_ngram=2) == (False, False)
    assert ready(1, ends=frozenset({2}), min_tokens=2) == (False, True)
    assert ready(7, forced_last=2) == (True, False)
