"""Texts that a model writes with what students' functions made of its weights, or chose.

Weights are changed on their way into the products of the reference executor; biases, norms and tables stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.learn.graders.reference import replaced
from numflow.quant.layout import ROW_SCHEMES, RowScheme

PROMPT, TOKENS = "Once upon a time", 24
UNIT, LEVELS, ZERO = 32, 11, 5  # of labs 9 and 10: columns with a scale, levels of a code, the code of 0
DRAFTS = {"tiny": "tiny-draft"}
Product = Callable[[np.ndarray], np.ndarray]  # x [T, K] -> y [T, N]


@dataclass(frozen=True)
class Ranges:
    """Scales and zeros [N, K / block] that reach from the smallest to the largest weight of each block."""

    scheme: RowScheme
    scales: np.ndarray
    zeros: np.ndarray

    @classmethod
    def of(cls, w: np.ndarray, scheme: RowScheme) -> "Ranges":
        """Those of weights [N, K]."""
        blocks = w.reshape(len(w), -1, scheme.block)
        least = blocks.min(axis=2)
        scales = (blocks.max(axis=2) - least) / np.float32(scheme.levels - 1)
        return cls(scheme, scales, np.where(scales > 0, -least / np.where(scales > 0, scales, 1), 0).astype(np.float32))

    def scales_and_zeros(self) -> tuple[np.ndarray, np.ndarray]:
        """As Fields has them."""
        return self.scales, self.zeros

    def values(self, codes: np.ndarray) -> np.ndarray:
        """float32 [N, K] of codes."""
        scales, zeros = (np.repeat(part, self.scheme.block, axis=1) for part in (self.scales, self.zeros))
        return scales * (codes - zeros)


@contextmanager
def multiplied(made: Callable[[np.ndarray], Product]) -> Iterator[None]:
    """Products of the reference executor inside: `made` turns each matrix w [N, K] into its product, once."""
    ready: dict[int, tuple[np.ndarray, Product]] = {}

    def linear(x, weight, bias=None):
        if id(weight) not in ready:
            ready[id(weight)] = weight, made(weight)  # the matrix is kept, so nothing else gets its number
        y = ready[id(weight)][1](x)
        return y if bias is None else y + bias

    with replaced({"linear": linear}):
        yield


def written(model: str, made: Callable[[np.ndarray], Product]) -> str:
    """PROMPT and the text that a model writes behind it."""
    import numflow

    with multiplied(made), numflow.load(model, backend="reference") as loaded:
        return PROMPT + loaded.generate(PROMPT, max_tokens=TOKENS, temperature=0).text


def with_weights(model: str, changed: Callable[[np.ndarray], np.ndarray], columns: int = UNIT) -> str:
    """The same, with matrices that `changed` returns for those whose columns are full units."""
    def made(w):
        values = changed(w) if w.shape[1] % columns == 0 else w
        return lambda x: x @ values.T

    return written(model, made)


def paired(w: np.ndarray, unit: int = UNIT) -> tuple[np.ndarray, np.ndarray]:
    """w [N, K] in 11 levels around 0: pairs of codes u8 [N, K / 2], scales f32 [N, K / unit]."""
    scale = np.abs(w.reshape(len(w), -1, unit)).max(axis=2) / np.float32(ZERO)
    step = np.repeat(np.where(scale > 0, scale, np.float32(1)), unit, axis=1)
    codes = np.rint(w / step) + ZERO
    return (codes[:, 0::2] + LEVELS * codes[:, 1::2]).astype(np.uint8), scale


def with_feedback(model: str, feedback: Callable, name: str = "q2") -> str:
    """Stories of a model in a scheme: rounded alone, then by `feedback` with moments of a story of its own."""
    import numflow

    scheme = ROW_SCHEMES[name]
    sums: dict[int, Any] = {}

    def watched(w):
        def product(x):
            sums[id(w)] = sums.get(id(w), 0) + x.T.astype(np.float64) @ x
            return x @ w.T
        return product

    def nearest(w, ranges):
        scales, zeros = (np.repeat(part, scheme.block, axis=1) for part in ranges.scales_and_zeros())
        return np.clip(np.rint(w / np.where(scales > 0, scales, 1) + zeros), 0, scheme.levels - 1)

    def product_of(codes_of):
        def made(w):
            ranges = Ranges.of(w, scheme)
            values = ranges.values(codes_of(w, ranges))
            return lambda x: x @ values.T
        return made

    def told(w, ranges):
        return feedback(w.copy(), scheme, sums[id(w)], ranges)

    with numflow.load(model, backend="reference") as loaded:
        with multiplied(watched):
            loaded.generate(PROMPT, max_tokens=200, temperature=1, seed=1)
        texts = []
        for codes_of in (nearest, told):
            with multiplied(product_of(codes_of)):
                texts.append(PROMPT + loaded.generate(PROMPT, max_tokens=TOKENS, temperature=0).text)
    return f"{texts[1]} (in {name}; rounded to the nearest codes it writes: {texts[0]})"


def chosen(model: str, functions: Any) -> str:
    """A text that `top_p` has chosen, with guesses that `verify` has looked at, and one of Mirostat with `accept`."""
    import numflow
    from numflow.decoding import chain, sampler
    from numflow.decoding.mirostat import Mirostat

    class View:
        """A Mirostat as the lab shows it."""

        def __init__(self, state):
            self.tau, self.eta, self.mu, self.drawn = state.tau, state.eta, state.mu, state._drawn

    def accept(state, id):
        if state._drawn is not None:
            view = View(state)
            functions["accept"](view, id)
            state.mu = view.mu

    places: list[tuple[Any, str, Any]] = [(Mirostat, "accept", accept), (sampler, "verify", functions["verify"])]
    before, kept = chain.STAGES["top_p"], [getattr(owner, name) for owner, name, _ in places]
    try:
        chain.STAGES["top_p"] = functions["top_p"]
        for owner, name, function in places:
            setattr(owner, name, function)
        with numflow.load(model, backend="reference", draft=DRAFTS.get(model)) as loaded:
            first = loaded.generate(PROMPT, max_tokens=TOKENS, temperature=1, top_p=0.9, seed=1)
        with numflow.load(model, backend="reference") as loaded:
            second = loaded.generate(PROMPT, max_tokens=TOKENS, mirostat=2, mirostat_tau=1.0, seed=1)
    finally:
        chain.STAGES["top_p"] = before
        for (owner, name, _), function in zip(places, kept, strict=True):
            setattr(owner, name, function)
    guesses = f", {first.stats['accepted_drafts']} of {first.stats['drafts']} guesses stayed" if model in DRAFTS else ""
    return f"{PROMPT}{first.text} (top-p{guesses}) / {PROMPT}{second.text} (Mirostat)"
