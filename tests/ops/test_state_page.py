"""The code of docs/state.md: its two forms against each other and against the reference."""

import re

import numpy as np
import pytest

from numflow.reference import linear_attention
from tests.conftest import REPO


@pytest.fixture(scope="module")
def page():
    names: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", (REPO / "docs/state.md").read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(code, "docs/state.md", "exec"), names)  # the second has its own assertions
    return names


@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_matrices_of_a_chunk_are_the_recurrence(page, tokens):
    rng = np.random.default_rng(tokens)
    q, k, v = (rng.standard_normal((tokens, size)) for size in (12, 12, 20))
    q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    g, beta, state = -rng.exponential(0.1, tokens), 2 * rng.random(tokens), rng.standard_normal((12, 20))
    y, after = page["recurrence"](q, k, v, g, beta, state)
    for size in (1, 7, 64):
        found, border, tail = page["in_pieces"](q, k, v, g, beta, state, size)
        np.testing.assert_allclose(found, y, atol=1e-12)
        assert len(tail[1]) == tokens % page["BLOCK"]
    _, end = page["recurrence"](*(x[:tokens // 16 * 16] for x in (q, k, v, g, beta)), state)
    np.testing.assert_allclose(border, end, atol=1e-12)
    own = state[None].astype(np.float32)
    decay = np.exp(g)[:, None, None]
    ours = linear_attention.recurrence(*(x[:, None].astype(np.float32) for x in (q, k, v)), own, decay, beta[:, None])
    np.testing.assert_allclose(ours[:, 0], y, atol=2e-6)
    np.testing.assert_allclose(own[0], after, atol=2e-6)
