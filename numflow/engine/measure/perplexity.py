"""Perplexity of a text in windows that do not overlap."""

import math
from collections.abc import Callable

import numpy as np

from numflow.decoding.sampler import NOT_FINITE
from numflow.errors import NotFiniteError, RequestError, did_you_mean

PROTOCOLS = {
    "plain": "the text is tokenised once, with the model's start token in front if it has one, and cut into windows "
             "of `context` tokens, the last one possibly shorter; each runs on its own and all but its first token "
             "are scored",
    "half": "as the tools around GGUF files measure: full windows only, the start token (if the model uses one) "
            "replaces the first token of each, and the tokens after the one in the middle are scored",
}


def perplexity(model, text: str, context: int = 512, chunks: int | None = None,
               progress: Callable[[int, int, float], None] | None = None, protocol: str = "plain") -> dict:
    """exp of the mean negative log-likelihood of a text's tokens.

    chunks:   number of windows from the start; None: all.
    progress: called after each window with (windows done, windows, perplexity so far).
    protocol: one of PROTOCOLS; results of different protocols are not comparable.

    Returns:
        perplexity, stderr (of the perplexity), nll (mean, natural logarithm), tokens (scored), chunks, context,
        protocol.

    Raises:
        RequestError: the text is too short, a setting is out of range, or the model is no decoder.
    """
    check_decoder(model)
    windows, skipped = windows_of(model, text, context, chunks, protocol)
    scores = []
    for done, window in enumerate(windows, 1):
        scores.append(log_likelihoods(model, window)[skipped:])
        if progress is not None:
            progress(done, len(windows), math.exp(-np.mean(np.concatenate(scores))))
    return {**summary(-np.concatenate(scores)), "chunks": len(windows), "context": context, "protocol": protocol}


def check_decoder(model) -> None:
    """Refuse models whose logits do not predict the next token.

    Raises:
        RequestError: an encoder, which attends to the predicted token too, or an encoder-decoder.
    """
    if not model.is_decoder:
        raise RequestError(f"{model.network.name} is no decoder: perplexity needs a model that predicts the next token")


def windows_of(model, text: str, context: int, chunks: int | None, protocol: str) -> tuple[list[list[int]], int]:
    """Windows of a text as ids, and number of rows at the start of each window that are not scored.

    Raises:
        RequestError: as `perplexity`.
    """
    if protocol not in PROTOCOLS:
        raise RequestError(f"no protocol {protocol!r}{did_you_mean(protocol, PROTOCOLS)}")
    if not 2 <= context <= model.context:
        raise RequestError(f"context should be 2 .. {model.context} tokens, is {context}")
    if chunks is not None and chunks < 1:
        raise RequestError(f"chunks should be at least 1, is {chunks}")
    ids = model.tokenizer.encode(text, parse_special=False)
    shortest, skipped = (2, 0) if protocol == "plain" else (context, context // 2)
    windows = [ids[start:start + context] for start in range(0, len(ids), context)]
    windows = [window for window in windows if len(window) >= shortest][:chunks]
    if not windows:
        raise RequestError(f"the text has {len(ids)} tokens; at least {shortest} are needed")
    if protocol == "half" and model.tokenizer.add_bos:
        windows = [[model.tokenizer.bos_id, *window[1:]] for window in windows]
    return windows, skipped


def log_likelihoods(model, ids) -> np.ndarray:
    """Log-probability of each token but the first, given those before it; float64 [len(ids) - 1].

    Raises:
        NotFiniteError: the logits are NaN.
    """
    targets, scores = np.asarray(ids[1:]), np.empty(len(ids) - 1)
    for start, logits in model.iter_logits(ids):
        pairs = zip(logits, targets[start:], strict=False)  # the last row has no target
        for row, (values, id) in enumerate(pairs, start):
            scores[row] = float(values[id]) - _log_sum_exp(values)
    return checked(scores, model)


def checked(values: np.ndarray, *models) -> np.ndarray:
    """Check that values computed from logits of models are not NaN; returns the values.

    Raises:
        NotFiniteError: a value is NaN.
    """
    if np.isnan(values).any():
        error = NotFiniteError(NOT_FINITE)
        raise next((told for model in models if (told := model.runner.explain(error)) is not error), error)
    return values


def _log_sum_exp(values) -> float:
    peak = np.max(values)
    return float(peak) + math.log(float(np.sum(np.exp(values - peak), dtype=np.float64)))


def summary(nll) -> dict:
    """The result of `perplexity` from negative log-likelihoods float64 [n]."""
    mean = float(np.mean(nll))
    spread = float(np.std(nll, ddof=1)) / math.sqrt(len(nll)) if len(nll) > 1 else 0.0
    return {"perplexity": math.exp(mean), "stderr": math.exp(mean) * spread, "nll": mean, "tokens": len(nll)}
