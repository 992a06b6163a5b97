"""The kernel picks the same tokens from the same logits as the sampler, to the last bit."""

from types import SimpleNamespace

import numpy as np
import pytest

from numflow.cpu.memory.buffers import aligned, padded
from numflow.cpu.runtime.kernel import HEADER_FIELDS, N_LOGIT_ROWS
from numflow.cpu.sample.sample import Draws, pick_tokens
from numflow.decoding.choice import Choice, draws, encode
from numflow.decoding.sampler import Sampler
from numflow.decoding.select import draw
from numflow.decoding.settings import Sampling
from numflow.decoding.weights import UNIT
from numflow.errors import RequestError
from numflow.executor.contract import MOST_STEPS

SETTINGS = (
    Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7), Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.8, top_k=5), Sampling(temperature=1.3, min_p=0.1), Sampling(temperature=2.0, top_p=0.05),
    Sampling(temperature=0.9, min_p=0.02, top_k=20, top_p=0.8), Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.5, top_k=12, top_p=0.7, samplers=("temperature", "top_p", "top_k")),
    Sampling(temperature=0.7, top_k=300, min_p=0.01, samplers=("temperature", "top_k", "min_p")),
    Sampling(temperature=5.0, top_p=0.999), Sampling(temperature=50.0, top_k=10**6), Sampling(temperature=1e-3),
    Sampling(temperature=0.9, min_p=1e-12), Sampling(temperature=1e-40), Sampling(temperature=1e39))
WIDTHS = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 1024, 1025, 5003)


class Logits:
    """The context that a binder needs, with rows of logits; values behind a row's end must not be read."""

    def __init__(self, rows):
        self.memory = aligned((len(rows), padded(rows.shape[1])), np.float32)
        self.memory[:] = 1e9
        self.memory[:, :rows.shape[1]] = rows
        fields = aligned(HEADER_FIELDS, np.int64)
        fields[N_LOGIT_ROWS] = len(rows)
        self._fields, self.header = fields, fields.ctypes.data

    def rows(self, view):
        return N_LOGIT_ROWS

    def strided(self, name, view):
        return {name: self.memory.ctypes.data, f"{name}_stride": self.memory.shape[1]}


def choice_of(settings, uniform=0.0):
    choice = Sampler(settings).choice()
    return choice._replace(uniform=uniform) if choice.temperature else choice


def by_kernel(rows, choices, threads=1):
    """The token of each row, picked by the kernel for its choice."""
    ctx, width = Logits(rows), rows.shape[1]
    drawn, found = Draws.of(len(rows), width, threads), np.full(len(rows), -7, np.int32)
    drawn.settings[:], drawn.random[:] = encode(choices), draws(choices, 1, MOST_STEPS)
    call = pick_tokens(ctx, SimpleNamespace(width=width), found, drawn=drawn)
    for thread in range(threads):
        call(thread, threads)
    return found.tolist()


def by_sampler(row, settings, uniform):
    c = Sampler(settings).candidates(row)
    return int(c.ids[0]) if len(c.ids) == 1 else draw(c.ids, c.weights, uniform)


def check(row, uniforms, settings=SETTINGS, threads=1):
    """Check the row under all settings, each with a random number."""
    found = by_kernel(np.tile(row, (len(settings), 1)), [choice_of(*both) for both in zip(settings, uniforms)], threads)
    assert found == [by_sampler(row, *both) for both in zip(settings, uniforms)]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_same_tokens(width):
    rng = np.random.default_rng(width)
    for spread in (0.1, 1, 3, 10):
        for _ in range(4):
            check(rng.normal(0, spread, width).astype(np.float32), rng.random(len(SETTINGS)), threads=2)


@pytest.mark.parametrize("width", WIDTHS[3::3])
def test_equal_logits_and_impossible_tokens(width):
    rng = np.random.default_rng(width)
    normal = rng.normal(0, 1, width).astype(np.float32)
    signs = np.where(rng.random(width) < 0.5, np.float32(-0.0), np.float32(0))  # a single candidate: the best
    some = np.where(rng.random(width) < 0.7, np.float32(-np.inf), normal)
    some[width // 2] = -1
    for row in (np.round(normal), np.zeros(width, np.float32), np.minimum(signs, np.round(normal) + 1), some,
                np.float32(1e4) * normal, np.where(np.arange(width) % 90 == 0, np.float32(9), np.float32(0))):
        check(row.astype(np.float32), rng.random(len(SETTINGS)))


@pytest.mark.parametrize("settings", SETTINGS[1:4] + SETTINGS[7:8], ids=str)
def test_random_numbers_at_the_borders_between_tokens(settings):
    row = np.random.default_rng(6).normal(0, 1.5, 700).astype(np.float32)
    c = Sampler(settings).candidates(row)
    units = np.cumsum(c.weights, dtype=np.float64) / UNIT
    borders = [-(-int(units[at]) * 2**32 // int(units[-1])) for at in range(0, len(units) - 1, 1 + len(units) // 60)]
    uniforms = [(border + step) / 2**32 for border in borders for step in (-1, 0, 1)]
    found = by_kernel(np.tile(row, (len(uniforms), 1)), [choice_of(settings, uniform) for uniform in uniforms])
    assert found == [by_sampler(row, settings, uniform) for uniform in uniforms]
    assert len(set(found)) > len(borders)


@pytest.mark.parametrize("width", [49152, 151936, 262144])
def test_vocabularies_of_models(width):
    rng = np.random.default_rng(width)
    row = rng.normal(0, 2.5, width).astype(np.float32)
    row[rng.integers(0, width, 50)] += 8
    for _ in range(3):
        check(row, rng.random(len(SETTINGS)))


def test_rows_that_are_not_numbers():
    rows = np.zeros((5, 40), np.float32)
    rows[0, 7], rows[1, 8], rows[2], rows[3, 9], rows[4, 39] = np.nan, np.inf, -np.inf, -np.inf, 2
    assert by_kernel(rows, [Choice(1.0, 0.0, (("top_k", 1),))] * 5) == [-1, -1, -1, 0, 39]
    assert by_kernel(rows, [Choice()] * 5) == [-1, -1, -1, 0, 39]


def test_more_tokens_than_sums_are_exact_for():
    with pytest.raises(RequestError, match="cannot draw from 1048577 tokens: 1048576 at most"):
        Draws.of(1, (1 << 20) + 1, 1)
