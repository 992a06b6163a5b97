"""Kullback-Leibler divergence of a model's next-token probabilities from those of a base model, over a text.

For each scored position, KL = sum over the vocabulary of p (log p - log q), p: probabilities of the base model, q: of
the model, in natural logarithms. Both models read the same windows of tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numflow.engine.measure.perplexity import PROTOCOLS, check_decoder, checked, summary, windows_of
from numflow.errors import RequestError
from numflow.quant.threads import default_threads

SAMPLE = 10_000  # characters on which tokenizers are compared
QUANTILES = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}


class Divergence:
    """Divergence of one model, accumulated window by window."""

    def __init__(self) -> None:
        self._kl: list[np.ndarray] = []
        self._same: list[np.ndarray] = []
        self._nll: list[np.ndarray] = []
        self._base_nll: list[np.ndarray] = []

    def add(self, kl: np.ndarray, same: np.ndarray, nll: np.ndarray, base_nll: np.ndarray) -> None:
        """Add a window: float64 [n] each, `same` bool [n]."""
        for values, new in ((self._kl, kl), (self._same, same), (self._nll, nll), (self._base_nll, base_nll)):
            values.append(new)

    @property
    def mean(self) -> float:
        """Mean divergence so far."""
        return float(np.mean(np.concatenate(self._kl)))

    def result(self) -> dict:
        """Result: perplexity, base_perplexity, kl and same_top with standard errors, tokens.

        Standard errors of kl and same_top are taken over windows, since tokens of one window are correlated; with a
        single window, over its tokens.
        """
        kl, same = np.concatenate(self._kl), np.concatenate(self._same)
        nll, base_nll = np.concatenate(self._nll), np.concatenate(self._base_nll)
        table = {"mean": float(kl.mean()), "stderr": _spread(self._kl), "max": float(kl.max()),
                 **{name: float(np.quantile(kl, share)) for name, share in QUANTILES.items()}}
        return {**summary(nll), "base_perplexity": math.exp(base_nll.mean()),
                "log_perplexity_ratio": float((nll - base_nll).mean()),
                "log_perplexity_ratio_stderr": _spread([a - b for a, b in zip(self._nll, self._base_nll)]), "kl": table,
                "same_top": float(same.mean()), "same_top_stderr": _spread(self._same)}


def divergence(model, base, text: str, context: int = 512, chunks: int | None = None,
               progress: Callable[[int, int, float], None] | None = None, protocol: str = "plain") -> dict:
    """Perplexity of `model` on a text, and its divergence from `base`.

    Arguments as in `perplexity`; progress is called with the mean divergence so far.

    Returns:
        `Divergence.result`, with chunks, context, protocol and the description of the protocol.

    Raises:
        RequestError: as `perplexity`; or the models have different vocabularies.
    """
    result = divergences({"": model}, base, text, context, chunks, progress, protocol)[""]
    over = "windows" if result["chunks"] > 1 else "tokens, there being one window, and so too small"
    return {**result, "protocol_text": f"{PROTOCOLS[protocol]}; divergence of the model from the base at every scored "
                                       f"token, in nats; its standard errors are over {over}"}


def divergences(models, base, text: str, context: int = 512, chunks: int | None = None, progress=None,
                protocol: str = "plain", every: int = 1) -> dict[str, dict]:
    """`divergence` of several models by name, with one run of the base; `progress` gets the mean of the first model.

    every: score only every so many tokens, which saves the logits of the others.
    """
    for model in (base, *models.values()):
        check_decoder(model)
    windows, skipped = windows_of(base, text, context, chunks, protocol)
    for name, model in models.items():
        if model.vocabulary != base.vocabulary:
            raise RequestError(f"divergence needs one vocabulary: {name or 'the model'} has {model.vocabulary} tokens, "
                               f"the base has {base.vocabulary}")
        sample = text[:SAMPLE]
        if model.tokenizer.encode(sample, parse_special=False) != base.tokenizer.encode(sample, parse_special=False):
            raise RequestError(f"divergence needs one vocabulary: {name or 'the model'} tokenizes the text "
                               f"differently from the base")
    found = {name: Divergence() for name in models}
    with ThreadPoolExecutor(default_threads()) as pool:
        for done, ids in enumerate(windows, 1):
            targets, logits = np.asarray(ids[1:]), list(base.iter_logits(ids, every))
            for name, model in models.items():
                columns = _window(pool, logits, model.iter_logits(ids, every), targets, skipped, every)
                found[name].add(*(checked(column, model, base) for column in columns))
            if progress is not None:
                progress(done, len(windows), next(iter(found.values())).mean)
    return {name: {**divergence.result(), "chunks": len(windows), "context": context, "protocol": protocol}
            for name, divergence in found.items()}


def mean_divergence(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """Mean divergence of logits q from logits p, over pairs (p, q) of float32 [n, V]."""
    with ThreadPoolExecutor(default_threads()) as pool:
        found = [kl for p, q in pairs for kl, *_ in pool.map(_compare, p, q, np.zeros(len(p), int))]
    return float(np.mean(found))


def _window(pool: ThreadPoolExecutor, base: Sequence[tuple[int, np.ndarray]], model: Iterator[tuple[int, np.ndarray]],
            targets: np.ndarray, skipped: int, every: int) -> tuple[np.ndarray, ...]:
    """(kl, same top, nll, nll of the base), [n] each, of the scored rows of a window."""
    rows: list[tuple] = []
    for (start, p), (other, q) in zip(base, model, strict=True):
        if start != other:
            raise RequestError("the two models split prompts into chunks of different lengths: load them with "
                           "the same chunk")
        scored = targets[start::every][:len(p)]  # the last row has no target
        first = max(0, -(-(skipped - start) // every))
        rows += pool.map(_compare, p[first:len(scored)], q[first:len(scored)], scored[first:])
    return tuple(np.array(column) for column in zip(*rows))


def _compare(p: np.ndarray, q: np.ndarray, target: int) -> tuple[float, bool, float, float]:
    """(kl, same top, nll of q, nll of p) for logits float32 [V] of one position."""
    top = p.argmax()
    p, q = p - p[top], q - q.max()
    weights, others = np.exp(p), np.exp(q)
    p_sum, q_sum = float(weights.sum(dtype=np.float64)), float(others.sum(dtype=np.float64))
    p_log, q_log = math.log(p_sum), math.log(q_sum)
    kl = float(np.sum(weights * (p - q), dtype=np.float64)) / p_sum - p_log + q_log
    # Rounding may give a small negative value.
    return max(kl, 0.0), bool(q[top] == 0), q_log - float(q[target]), p_log - float(p[target])


def _spread(windows: Sequence[np.ndarray]) -> float:
    """Standard error of the mean over all tokens, from the means of windows; with a single window, from its tokens."""
    if len(windows) < 2:
        tokens = windows[0]
        return float(np.std(tokens, ddof=1)) / math.sqrt(len(tokens)) if len(tokens) > 1 else 0.0
    means, counts = (np.array([f(w) for w in windows], np.float64) for f in (np.mean, len))
    overall = np.average(means, weights=counts)
    share = counts / counts.sum()
    return float(np.sqrt(np.sum(np.square(share * (means - overall))) * len(means) / (len(means) - 1)))
