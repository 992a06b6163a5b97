"""Texts of a model whose weights students' functions have changed, or whose tokens they have chosen.

Weights are changed in the matrix products of the reference executor. Biases, norms and embeddings stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.learn.graders.reference import replaced
from numflow.quant.layout import ROW_SCHEMES, RowScheme

PROMPT, TOKENS = "Once upon a time", 24
UNIT, LEVELS, ZERO = 32, 11, 5  # of labs 9 and 10: columns per scale, number of codes, code of the weight 0
DRAFTS = {"tiny": "tiny-draft"}
Product = Callable[[np.ndarray], np.ndarray]  # x [T, K] -> y [T, N]


@dataclass(frozen=True)
class Ranges:
    """Scales and zeros [N, K / block] for ranges from the smallest to the largest weight of each block."""

    scheme: RowScheme
    scales: np.ndarray
    zeros: np.ndarray

    @classmethod
    def of(cls, w: np.ndarray, scheme: RowScheme) -> "Ranges":
        """The ranges of weights [N, K]."""
        blocks = w.reshape(len(w), -1, scheme.block)
        least = blocks.min(axis=2)
        scales = (blocks.max(axis=2) - least) / np.float32(scheme.levels - 1)
        return cls(scheme, scales, np.where(scales > 0, -least / np.where(scales > 0, scales, 1), 0).astype(np.float32))

    def scales_and_zeros(self) -> tuple[np.ndarray, np.ndarray]:
        """Scales and zeros, as Fields.scales_and_zeros."""
        return self.scales, self.zeros

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Decoded weights float32 [N, K] of codes."""
        scales, zeros = (np.repeat(part, self.scheme.block, axis=1) for part in (self.scales, self.zeros))
        return scales * (codes - zeros)


@contextmanager
def multiplied(product_of: Callable[[np.ndarray], Product]) -> Iterator[None]:
    """A context in which the reference executor multiplies each matrix w [N, K] by product_of(w), called once for w."""
    products: dict[int, tuple[np.ndarray, Product]] = {}

    def linear(x, weight, bias=None):
        if id(weight) not in products:
            products[id(weight)] = weight, product_of(weight)  # a reference to the matrix keeps its id() unique
        y = products[id(weight)][1](x)
        return y if bias is None else y + bias

    with replaced({"linear": linear}):
        yield


def written(model: str, product_of: Callable[[np.ndarray], Product]) -> str:
    """PROMPT and its continuation by a model with other matrix products."""
    import numflow

    with multiplied(product_of), numflow.load(model, backend="reference") as loaded:
        return PROMPT + loaded.generate(PROMPT, max_tokens=TOKENS, temperature=0).text


def with_weights(model: str, changed: Callable[[np.ndarray], np.ndarray], columns: int = UNIT) -> str:
    """PROMPT and its continuation by a model with matrices changed(w), if w has a multiple of `columns` columns."""
    def product_of(w):
        values = changed(w) if w.shape[1] % columns == 0 else w
        return lambda x: x @ values.T

    return written(model, product_of)


def paired(w: np.ndarray, unit: int = UNIT) -> tuple[np.ndarray, np.ndarray]:
    """Quantise w [N, K] to 11 levels around 0: pairs of codes u8 [N, K / 2], scales f32 [N, K / unit]."""
    scale = np.abs(w.reshape(len(w), -1, unit)).max(axis=2) / np.float32(ZERO)
    step = np.repeat(np.where(scale > 0, scale, np.float32(1)), unit, axis=1)
    codes = np.rint(w / step) + ZERO
    return (codes[:, 0::2] + LEVELS * codes[:, 1::2]).astype(np.uint8), scale


def with_feedback(model: str, feedback: Callable, name: str = "q2") -> str:
    """Texts of a model in a scheme: with codes from `feedback`, and with the nearest codes.

    The moments come from a text that the model has generated before.
    """
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

    def quantised(codes_of):
        def product_of(w):
            ranges = Ranges.of(w, scheme)
            values = ranges.values(codes_of(w, ranges))
            return lambda x: x @ values.T
        return product_of

    def by_feedback(w, ranges):
        return feedback(w.copy(), scheme, sums[id(w)], ranges)

    with numflow.load(model, backend="reference") as loaded:
        with multiplied(watched):
            loaded.generate(PROMPT, max_tokens=200, temperature=1, seed=1)
        texts = []
        for codes_of in (nearest, by_feedback):
            with multiplied(quantised(codes_of)):
                texts.append(PROMPT + loaded.generate(PROMPT, max_tokens=TOKENS, temperature=0).text)
    return f"{texts[1]} (in {name}; rounded to the nearest codes it writes: {texts[0]})"


def chosen(model: str, functions: Any) -> str:
    """Two texts: one sampled with `top_p`, with draft tokens checked by `verify`; one by Mirostat with `accept`."""
    import numflow
    from numflow.decoding import chain, sampler
    from numflow.decoding.mirostat import Mirostat

    class View:
        """The state of Mirostat, as the lab describes it."""

        def __init__(self, state):
            self.tau, self.eta, self.mu, self.drawn = state.tau, state.eta, state.mu, state._drawn

    def accept(state, id):
        if state._drawn is not None:
            view = View(state)
            functions["accept"](view, id)
            state.mu = view.mu

    patches: list[tuple[Any, str, Any]] = [(Mirostat, "accept", accept), (sampler, "verify", functions["verify"])]
    before, originals = chain.STAGES["top_p"], [getattr(owner, name) for owner, name, _ in patches]
    try:
        chain.STAGES["top_p"] = functions["top_p"]
        for owner, name, function in patches:
            setattr(owner, name, function)
        with numflow.load(model, backend="reference", draft=DRAFTS.get(model)) as loaded:
            first = loaded.generate(PROMPT, max_tokens=TOKENS, temperature=1, top_p=0.9, seed=1)
        with numflow.load(model, backend="reference") as loaded:
            second = loaded.generate(PROMPT, max_tokens=TOKENS, mirostat=2, mirostat_tau=1.0, seed=1)
    finally:
        chain.STAGES["top_p"] = before
        for (owner, name, _), function in zip(patches, originals, strict=True):
            setattr(owner, name, function)
    guesses = (f", {first.stats['accepted_drafts']} of {first.stats['drafts']} guesses accepted" if model in DRAFTS
               else "")
    return f"{PROMPT}{first.text} (top-p{guesses}) / {PROMPT}{second.text} (Mirostat)"
