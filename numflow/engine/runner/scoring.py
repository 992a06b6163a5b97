"""Log-probabilities of given tokens: of a prompt, and of continuations for evaluation harnesses."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from numflow.decoding.logprobs import TokenLogprob, log_likelihood, token_logprobs
from numflow.engine.request.adapter import text_adapter
from numflow.engine.request.request import Request
from numflow.engine.runner.batches import BatchPart
from numflow.engine.runner.runner import ROW_VALUES, Runner
from numflow.engine.runner.texts import BATCH_ROWS, groups
from numflow.errors import RequestError

NO_ROWS = np.zeros(0, np.int32)
Ids = Sequence[int] | np.ndarray


class Likelihood(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding gives the continuation."""

    logprob: float
    is_greedy: bool


class Continuation(NamedTuple):
    """A context int32 [n] and its continuation int32 [m]; `ids`: the tokens that run."""

    context: np.ndarray
    continuation: np.ndarray

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.context, self.continuation[:-1]])


def prompt_logprobs(runner: Runner, request: Request) -> list[TokenLogprob | None]:
    """Log-probability of each token of a request's prompt, None for the first."""
    ids, top = request.prompt, request.scored or 0
    adapter = text_adapter(request.adapter, ids)
    found: list[TokenLogprob | None] = [None]
    with runner.open(len(ids), reach=request.max_length, adapter=adapter.number,
                     adapter_start=adapter.first) as sequence:
        for start, rows in sequence.rows(ids[:-1]):
            found += token_logprobs(rows, ids[start + 1:start + 1 + len(rows)], top)
    return found


def loglikelihoods(runner: Runner, pairs: Sequence[tuple[Ids, Ids]], bos: int | None) -> list[Likelihood]:
    """See Model.loglikelihoods. bos: start token, used as the context if that is empty."""
    by_context: dict[Hashable, list[int]] = {}
    checked = [_checked(runner, *pair, bos) for pair in pairs]
    for index, pair in enumerate(checked):
        key = pair.context.tobytes(), runner.variant(len(pair.ids))
        by_context.setdefault(key, []).append(index)
    limit = max(1, min(BATCH_ROWS, ROW_VALUES // runner.vocabulary))
    found: dict[int, Likelihood] = {}
    single: list[int] = []
    for indices in by_context.values():
        if len(indices) > 1 or len(checked[indices[0]].ids) > limit:
            continuations = [checked[index].continuation for index in indices]
            scores = _one_context(runner, checked[indices[0]].context, continuations)
            found |= zip(indices, scores, strict=True)
        else:
            single += indices
    done = 0
    for group in groups((checked[index] for index in single), limit):
        found |= zip(single[done:done + len(group)], _side_by_side(runner, group), strict=True)
        done += len(group)
    return [found[index] for index in range(len(pairs))]


def _checked(runner, context, continuation, bos) -> Continuation:
    if len(context) == 0 and bos is None:
        raise RequestError("the context is empty, and the model has no token that starts a text")
    pair = Continuation(runner.facts.check(context if len(context) else [bos], "context"),
                        runner.facts.check(continuation, "continuation"))
    if len(pair.ids) > runner.context:
        raise RequestError(f"context and continuation have {len(pair.ids) + 1} tokens; the model's context is "
                           f"{runner.context} tokens")
    return pair


def _one_context(runner, context, continuations) -> list[Likelihood]:
    """Scores of continuations of one context, which runs once."""
    results, before = [], len(context) - 1
    with runner.open(before + max(map(len, continuations))) as sequence:
        if before:
            rest = sequence.advance(context[:-1])
            runner.run([BatchPart(sequence, rest, NO_ROWS)], None)
        sequence.mark()
        for ids in continuations:
            sequence.rewind(before)  # drops the previous continuation
            run = np.concatenate([context[-1:], ids[:-1]])
            parts = [log_likelihood(rows, ids[start:start + len(rows)]) for start, rows in sequence.rows(run)]
            results.append(Likelihood(sum(logprob for logprob, _ in parts), all(greedy for _, greedy in parts)))
    return results


def _side_by_side(runner, pairs) -> list[Likelihood]:
    sequences = [runner.open(len(pair.ids)) for pair in pairs]
    try:
        y = runner.run([BatchPart(sequence, pair.ids, np.arange(len(pair.context) - 1, len(pair.ids), dtype=np.int32))
                        for sequence, pair in zip(sequences, pairs, strict=True)], "logits")
    finally:
        for sequence in sequences:
            sequence.close()
    ends = np.cumsum([len(pair.continuation) for pair in pairs])
    return [Likelihood(*log_likelihood(rows, pair.continuation))
            for rows, pair in zip(np.split(y, ends[:-1]), pairs, strict=True)]
