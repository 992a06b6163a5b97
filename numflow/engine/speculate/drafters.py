"""Drafters: prompt lookup (n-grams of the text), draft models, and draft blocks. See numflow.engine.speculate.draft."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from numflow.decoding.lookup import lookup
from numflow.decoding.sampler import Sampler
from numflow.decoding.select import draw
from numflow.decoding.speculative import MAX_DRAFTS, Distribution, DraftLength, StepTimes
from numflow.engine.request.request import Request
from numflow.engine.runner.batches import BatchPart
from numflow.engine.runner.runner import Runner
from numflow.engine.speculate.draft import Drafter
from numflow.errors import NumflowError, RequestError

RATES = (0.0, 0.45, 0.6, 0.8, 0.8)  # initial acceptance rates, by the size of the n-gram that matched
DRAFT_INDEX = 1 << 32  # added to a sample's index, so that drafts and tokens use different random numbers


class SpeedDrafter:
    """Base of drafters that choose the number of drafts by measured speed.

    times: durations of rounds, shared by all texts with this kind of drafter. most: fixed number of drafts; 0: chosen
    for speed.
    """

    needs_streams = False

    def __init__(self, times: StepTimes, most: int = 0):
        self._times, self._most = times, most
        self._length = DraftLength(MAX_DRAFTS)  # chooser for the latest drafts
        self._proposed = False  # whether the next step runs a proposal

    def propose(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        """At most `limit` draft tokens after `ids`."""
        self._times.enter(self)
        self._proposed = True
        return self.draft(ids, limit)

    def count(self, limit: int) -> int:
        """Number of tokens to draft now."""
        return min(limit, self._most or self._length.choose(self._times))

    def accepted(self, proposed: int, accepted: int) -> None:
        """Note that the first `accepted` of `proposed` drafts were accepted."""
        if self._proposed:  # else the step was a prefill
            self._times.ended(proposed)
            self._proposed = False
        self._length.update(proposed, accepted)

    def observe(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Do nothing: most drafters do not need streams."""

    def draft(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        """Draft at most `limit` tokens."""
        raise NotImplementedError

    def distribution(self, index: int) -> Distribution | None:
        """Distribution that the latest draft `index` was sampled from; None: the draft was not sampled."""
        return None

    def close(self) -> None:
        """The text has ended."""
        self._times.leave(self)


class NgramDrafter(SpeedDrafter):
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the latest tokens.

    before: further tokens to search, such as the text that an encoder has read.

    Longer matches have higher acceptance rates: each n-gram size has its own DraftLength.
    """

    def __init__(self, times: StepTimes, most: int = 0, before: np.ndarray | None = None):
        super().__init__(times, most)
        self._before = np.zeros(0, np.int32) if before is None else before
        self._lengths = [DraftLength(MAX_DRAFTS, rate) for rate in RATES]

    def draft(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        ids = np.asarray(ids, np.int32)
        found, size = lookup(np.concatenate([self._before, ids]) if len(self._before) else ids, limit)
        self._length = self._lengths[size]
        return found[:self.count(limit)].tolist() if size else []


class ModelDrafter(SpeedDrafter):
    """Drafts with a smaller model of the same vocabulary, in a separate sequence.

    runner: runner of the draft model. sampler: sampler of the text: drafts are sampled with its settings and seed.
    """

    def __init__(self, runner: Runner, sampler: Sampler, limit: int, times: StepTimes, most: int = 0):
        super().__init__(times, most)
        self._runner, self._sampler = runner, sampler
        self._sequence = runner.open(min(limit, runner.context))
        self._ids = np.zeros(0, np.int32)  # tokens in the sequence
        self._from: list[Distribution | None] = []

    def propose(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        if not self._most and self._length.pauses():  # without reading the clock, which would slow small models
            return []
        return super().propose(ids, limit)

    def draft(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        count = min(self.count(limit), self._sequence.limit - len(ids))
        self._from = []
        if count <= 0:
            return []
        logits = self._run_text(np.asarray(ids, np.int32))
        if logits is None:
            return []
        drafts: list[int] = []
        sampler = self._sampler.copy()
        sampler.settings, sampler.index = replace(sampler.settings, logprobs=None), sampler.index + DRAFT_INDEX
        while True:
            try:
                drafts.append(self._next(sampler, logits))
            except RequestError:  # the text's sampler raises the error, if the text gets there
                break
            if len(drafts) == count or drafts[-1] in sampler.constraints.ends or sampler.complete:
                break
            logits = self._run(drafts[-1:])
        return drafts

    def _next(self, sampler: Sampler, logits: np.ndarray) -> int:
        if sampler.settings.deterministic:
            self._from.append(None)
            return sampler.pick(logits)
        source = Distribution(*sampler.distribution(logits))
        id = draw(*source, sampler.uniform())
        sampler.accept(id)
        self._from.append(source)
        return id

    def distribution(self, index: int) -> Distribution | None:
        return self._from[index]

    def _run_text(self, ids: np.ndarray) -> np.ndarray | None:
        """Logits [V] after `ids`. Only tokens that differ from those in the sequence run. None: no logits available."""
        common = min(len(ids) - 1, len(self._ids))
        differs = np.flatnonzero(ids[:common] != self._ids[:common])
        self._ids = ids[:self._sequence.rewind(int(differs[0]) if len(differs) else common)]
        logits = self._run(ids[self._sequence.length:])
        self._sequence.mark()
        return logits

    def _run(self, ids) -> np.ndarray:
        ids = np.asarray(ids, np.int32)
        logits = self._sequence.last(ids)
        self._ids = np.concatenate([self._ids, ids])
        return logits[:self._runner.vocabulary]

    def close(self) -> None:
        super().close()
        self._sequence.close()


class BlockDrafter(ModelDrafter):
    """Drafts with a block that reads the residual streams of the model (network/build/draft.py).

    Token i + 1 runs with the stream of token i. Drafts after the first one run with the hidden state of the block; when
    the model has run them, they run again with its streams.

    If the beginning of a text came from the prefix cache, the model gave no streams for it: the block starts after it.
    The text is exact as ever, with less context for the drafts.
    """

    needs_streams = True

    def __init__(self, runner: Runner, sampler: Sampler, limit: int, times: StepTimes, most: int = 0):
        super().__init__(runner, sampler, limit, times, most)
        self._begin = 0  # index in the text of the first token of the sequence
        self._ran = 0  # rows of the sequence that ran with the model's streams
        self._waiting: list[np.ndarray] = []  # streams of the tokens after these rows, in pieces
        self._waiting_tokens = 0  # number of tokens in _waiting
        self._hidden = np.zeros((0, 0), np.float32)  # [1, D]: hidden state of the block at its last row
        words = runner.network.facts.get("words")
        self._words: np.ndarray | None = words

    def observe(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Store the streams of tokens from `start` on, and run full chunks."""
        first = self._begin + self._ran
        if start > first + self._waiting_tokens:
            self._restart(start)
            first = start
        if start + len(rows) <= first:
            return  # a preempted text runs again
        self._keep(start - first)
        self._waiting.append(rows[max(0, first - start):])
        self._waiting_tokens += len(self._waiting[-1])
        chunk = self._runner.chunk
        while self._waiting_tokens >= chunk and len(ids) > self._begin + self._ran + chunk:
            self._run_waiting(ids, chunk)

    def _restart(self, begin: int) -> None:
        self._sequence.rewind(0)
        self._begin, self._ran = begin, 0
        self._keep(0)

    def _keep(self, count: int) -> None:
        """Keep the streams of the first `count` waiting tokens only."""
        if count < self._waiting_tokens:
            self._waiting_tokens = max(0, count)
            self._waiting = [np.concatenate(self._waiting)[:self._waiting_tokens]] if self._waiting_tokens else []

    def _run_text(self, ids: np.ndarray) -> np.ndarray | None:
        count = len(ids) - 1 - self._begin - self._ran
        self._keep(count)  # streams after these belong to rejected drafts
        if not 0 < count == self._waiting_tokens:
            return None
        return self._run_waiting(ids, count)

    def _run_waiting(self, ids: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        """Run `count` rows with the model's streams; returns the logits [V] after them."""
        if self._sequence.rewind(self._ran) != self._ran:
            self._restart(self._begin + self._ran)
        first, logits = self._begin + self._ran + 1, np.zeros(0, np.float32)
        waiting = np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        for offset in range(0, count, self._runner.chunk):
            rows = waiting[offset:min(count, offset + self._runner.chunk)]
            tokens = np.asarray(ids[first + offset:first + offset + len(rows)], np.int32)
            logits = self._step(tokens, self._reduced(tokens, rows))
        self._ran, self._waiting_tokens = self._ran + count, self._waiting_tokens - count
        self._waiting = [waiting[count:]] if self._waiting_tokens else []
        return logits

    def _reduced(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Streams reduced to the input width of the block."""
        if "reduce" not in self._runner.network.entries:
            return rows
        with self._runner.lock:
            part = BatchPart(self._sequence, ids, np.zeros(0, np.int32), given={"streams": rows})
            return np.array(self._runner.execute([part], "reduce", "reduced"))

    def _run(self, ids) -> np.ndarray:
        return self._step(np.asarray(ids, np.int32), self._hidden)

    def _step(self, ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        with self._runner.lock:
            last = np.array([len(ids) - 1], np.int32)
            logits = self._runner.run([BatchPart(self._sequence, ids, last, given={"hidden": hidden})], "logits")[0]
            self._hidden = self._runner.program.result("hidden")
        if self._words is None:
            return logits[:self._runner.vocabulary]
        found = np.full(self._runner.vocabulary, -np.inf, np.float32)
        found[self._words] = logits
        return found


class Drafters:
    """Factory of drafters for the requests of a model.

    times, lookup_times: durations of rounds with the runner's drafts, and with n-grams. runner: runner of a draft
    model, or of a draft block (then `block` is True); None without one.
    """

    def __init__(self) -> None:
        self.times, self.lookup_times = StepTimes(), StepTimes()
        self.runner: Runner | None = None
        self.block = False

    def use(self, runner: Runner | None, block: bool = False) -> None:
        """Set the runner of a draft model or a draft block."""
        self.close()
        self.runner, self.block, self.times = runner, block, StepTimes()

    def close(self) -> None:
        """Close a draft block; a draft model belongs to the caller."""
        if self.block and self.runner is not None:
            self.runner.program.close()
            self.runner, self.block = None, False

    def make(self, request: Request, sampler: Sampler) -> Drafter | None:
        """Drafter for the text of a sampler; None without speculative decoding."""
        if request.speculate == "ngram":
            return NgramDrafter(self.lookup_times, request.draft_tokens, request.prompt if request.encoder else None)
        if request.speculate == "off":
            return None
        assert self.runner is not None  # else the request was refused
        kind = BlockDrafter if self.block else ModelDrafter
        return kind(self.runner, sampler, request.max_length, self.times, request.draft_tokens)


def check_draft(model, draft) -> None:
    """Check that a model can draft for another one.

    Raises:
        RequestError: the draft model is no decoder, or has another vocabulary.
    """
    name = draft.network.name
    if not draft.facts.decoder or "logits" not in draft.facts.outputs:
        raise RequestError(f"{name} cannot guess tokens: a draft model is a decoder with an output head")
    if model.facts.encoder:
        raise RequestError(f"{model.network.name} is an encoder-decoder: a draft model cannot guess for it")
    if draft.vocabulary != model.vocabulary:
        raise RequestError(f"the draft model {name} has {draft.vocabulary} token ids, {model.network.name} "
                           f"{model.vocabulary}: they need one vocabulary")
    try:
        ours, theirs = model.tokenizer, draft.tokenizer
    except NumflowError:
        return  # a model without a tokenizer cannot be compared
    for id in range(min(ours.vocab_size, theirs.vocab_size)):
        if ours.vocabulary.text(id) != theirs.vocabulary.text(id):
            raise RequestError(f"the draft model {name} has another vocabulary than {model.network.name}: token {id} "
                               f"is {theirs.vocabulary.text(id)!r}, not {ours.vocabulary.text(id)!r}")
