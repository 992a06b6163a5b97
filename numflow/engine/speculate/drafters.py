"""Sources of draft tokens: the text's own n-grams, or a draft model. See numflow.engine.speculate.draft."""

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

RATES = (0.0, 0.45, 0.6, 0.8, 0.8)  # how often drafts are right, by how many tokens agree, before anything is known
OWN_NUMBERS = 1 << 32  # added to a sample's index: the random numbers of its drafts are others than those of its tokens


class Paced:
    """A Drafter of as many tokens as pay.

    times: what rounds take, shared by all texts of this kind of drafter. most: always so many drafts; 0: as many as
    pay.
    """

    listens = False

    def __init__(self, times: StepTimes, most: int = 0):
        self._times, self._most = times, most
        self._length = DraftLength(MAX_DRAFTS)  # of the latest drafts
        self._proposed = False  # a step follows that a proposal was made for

    def propose(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        """At most `limit` tokens that may follow `ids`."""
        self._times.enter(self)
        self._proposed = True
        return self.draft(ids, limit)

    def count(self, limit: int) -> int:
        """Number of tokens to draft now."""
        return min(limit, self._most or self._length.choose(self._times))

    def accepted(self, proposed: int, accepted: int) -> None:
        """Of so many drafts that ran the first `accepted` were right."""
        if self._proposed:  # else the prompt has run
            self._times.ended(proposed)
            self._proposed = False
        self._length.update(proposed, accepted)

    def saw(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Most drafters do not listen."""

    def draft(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        """At most `limit` tokens."""
        raise NotImplementedError

    def drawn_from(self, place: int) -> Distribution | None:
        """The distribution that the latest draft at `place` was drawn from; None: it was not drawn."""
        return None

    def close(self) -> None:
        """The text has ended."""
        self._times.leave(self)


class NgramDrafter(Paced):
    """Drafts the tokens that came after an earlier occurrence of the text's latest ones.

    before: tokens that the text may repeat too, such as those an encoder has read.

    The more tokens agree, the more often the draft is right: each such length has its own count.
    """

    def __init__(self, times: StepTimes, most: int = 0, before: np.ndarray | None = None):
        super().__init__(times, most)
        self._before = np.zeros(0, np.int32) if before is None else before
        self._lengths = [DraftLength(MAX_DRAFTS, rate) for rate in RATES]

    def draft(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        ids = np.asarray(ids, np.int32)
        found, agree = lookup(np.concatenate([self._before, ids]) if len(self._before) else ids, limit)
        self._length = self._lengths[agree]
        return found[:self.count(limit)].tolist() if agree else []


class ModelDrafter(Paced):
    """Drafts with a smaller model of the same vocabulary, in a sequence of its own.

    runner: of that model. sampler: the text's own, whose strategies and random numbers the drafts are drawn with.
    """

    def __init__(self, runner: Runner, sampler: Sampler, limit: int, times: StepTimes, most: int = 0):
        super().__init__(times, most)
        self._runner, self._sampler = runner, sampler
        self._sequence = runner.open(min(limit, runner.context))
        self._held = np.zeros(0, np.int32)  # tokens in the sequence
        self._from: list[Distribution | None] = []

    def propose(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        if not self._most and self._length.rests():  # without a look at the clock, which would cost a small model time
            return []
        return super().propose(ids, limit)

    def draft(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        count = min(self.count(limit), self._sequence.limit - len(ids))
        self._from = []
        if count <= 0:
            return []
        logits = self._catch_up(np.asarray(ids, np.int32))
        if logits is None:
            return []
        drafts: list[int] = []
        sampler = self._sampler.copy()
        sampler.settings, sampler.index = replace(sampler.settings, logprobs=None), sampler.index + OWN_NUMBERS
        while True:
            try:
                drafts.append(self._next(sampler, logits))
            except RequestError:  # the text's own sampler will say what is wrong, if it comes that far
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

    def drawn_from(self, place: int) -> Distribution | None:
        return self._from[place]

    def _catch_up(self, ids: np.ndarray) -> np.ndarray | None:
        """Logits [V] behind `ids`, of which only those run that differ from what the sequence holds; None: unknown."""
        common = min(len(ids) - 1, len(self._held))
        differs = np.flatnonzero(ids[:common] != self._held[:common])
        self._held = ids[:self._sequence.rewind(int(differs[0]) if len(differs) else common)]
        logits = self._run(ids[self._sequence.length:])
        self._sequence.mark()
        return logits

    def _run(self, ids) -> np.ndarray:
        ids = np.asarray(ids, np.int32)
        logits = self._sequence.last(ids)
        self._held = np.concatenate([self._held, ids])
        return logits[:self._runner.vocabulary]

    def close(self) -> None:
        super().close()
        self._sequence.close()


class BlockDrafter(ModelDrafter):
    """Drafts with a block that reads the streams of the model (network/build/draft.py).

    Token i + 1 runs with the stream of token i. Drafts behind the first one run with what the block itself knew; when
    the model has run them, they run again with its streams.

    A text whose beginning the model did not run, as its prefix cache had it, is drafted from there on: exact as ever,
    with less to go by.
    """

    listens = True

    def __init__(self, runner: Runner, sampler: Sampler, limit: int, times: StepTimes, most: int = 0):
        super().__init__(runner, sampler, limit, times, most)
        self._begin = 0  # token of the text that the sequence begins with
        self._ran = 0  # of the sequence's rows, those that ran with the model's streams
        self._waiting: list[np.ndarray] = []  # streams of the tokens behind those, in pieces
        self._waits = 0  # of so many tokens
        self._hidden = np.zeros((0, 0), np.float32)  # [1, D]: what the block knew at its last row
        words = runner.network.facts.get("words")
        self._words: np.ndarray | None = words

    def saw(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Keep the streams of tokens from `start` on, and run what is more than a chunk."""
        first = self._begin + self._ran
        if start > first + self._waits:
            self._restart(start)
            first = start
        if start + len(rows) <= first:
            return  # a text that made place runs again
        self._keep(start - first)
        self._waiting.append(rows[max(0, first - start):])
        self._waits += len(self._waiting[-1])
        chunk = self._runner.chunk
        while self._waits >= chunk and len(ids) > self._begin + self._ran + chunk:
            self._follow(ids, chunk)

    def _restart(self, begin: int) -> None:
        self._sequence.rewind(0)
        self._begin, self._ran = begin, 0
        self._keep(0)

    def _keep(self, count: int) -> None:
        """Forget the streams of all waiting tokens but the first so many."""
        if count < self._waits:
            self._waits = max(0, count)
            self._waiting = [np.concatenate(self._waiting)[:self._waits]] if self._waits else []

    def _catch_up(self, ids: np.ndarray) -> np.ndarray | None:
        known = len(ids) - 1 - self._begin - self._ran
        self._keep(known)  # what is behind belongs to drafts that were wrong
        if not 0 < known == self._waits:
            return None
        return self._follow(ids, known)

    def _follow(self, ids: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        """Run so many rows with the model's streams; logits [V] behind them."""
        if self._sequence.rewind(self._ran) != self._ran:
            self._restart(self._begin + self._ran)
        first, logits = self._begin + self._ran + 1, np.zeros(0, np.float32)
        waiting = np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        for at in range(0, count, self._runner.chunk):
            rows = waiting[at:min(count, at + self._runner.chunk)]
            tokens = np.asarray(ids[first + at:first + at + len(rows)], np.int32)
            logits = self._step(tokens, self._reduced(tokens, rows))
        self._ran, self._waits = self._ran + count, self._waits - count
        self._waiting = [waiting[count:]] if self._waits else []
        return logits

    def _reduced(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Streams as what the block reads."""
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
    """Makes the drafters of a model's requests.

    times, lookup_times: what rounds with drafts of that runner take, and with n-grams. runner: of a draft model, or of
    a block that drafts by the model's streams (block); None without one.
    """

    def __init__(self) -> None:
        self.times, self.lookup_times = StepTimes(), StepTimes()
        self.runner: Runner | None = None
        self.block = False

    def use(self, runner: Runner | None, block: bool = False) -> None:
        """Draft with a model's runner, or with a block's."""
        self.close()
        self.runner, self.block, self.times = runner, block, StepTimes()

    def close(self) -> None:
        """Drop a block; a draft model belongs to others."""
        if self.block and self.runner is not None:
            self.runner.program.close()
            self.runner, self.block = None, False

    def make(self, request: Request, sampler: Sampler) -> Drafter | None:
        """A drafter of the text that a sampler picks; None: the request wants none."""
        if request.speculate == "ngram":
            return NgramDrafter(self.lookup_times, request.draft_tokens, request.prompt if request.encoder else None)
        if request.speculate == "off":
            return None
        assert self.runner is not None  # else the request was refused
        kind = BlockDrafter if self.block else ModelDrafter
        return kind(self.runner, sampler, request.reach, self.times, request.draft_tokens)


def check_draft(model, draft) -> None:
    """Check that a model can draft for another.

    Raises:
        RequestError: it is no decoder, or its vocabulary is another one.
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
        return  # ids alone; whoever uses them has to know
    for id in range(min(ours.vocab_size, theirs.vocab_size)):
        if ours.vocabulary.text(id) != theirs.vocabulary.text(id):
            raise RequestError(f"the draft model {name} has another vocabulary than {model.network.name}: token {id} "
                               f"is {theirs.vocabulary.text(id)!r}, not {ours.vocabulary.text(id)!r}")
