"""Runs generation requests: one as a stream of tokens, or several side by side."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from numflow.engine.batch import BATCH_ROWS
from numflow.engine.beam import BeamSearch, Hypothesis
from numflow.engine.generation import Generation, Piece, TextStream, Timing
from numflow.engine.request import Request
from numflow.engine.sequence import Part, Runner

MAX_BEAMS = 64  # sequences that run side by side
Decoder = Callable[[Request], Any]  # what turns a request's new ids into text, or None without a tokenizer


class OneByOne:
    """Picks one token after the other, greedily or at random: a BeamSearch with one beam that ends at an end token.

    new: ids so far, without an end token. ended: whether one came. done: whether there is no more to pick.
    """

    def __init__(self, request: Request):
        self.new: list[int] = []
        self.ended, self.done = False, request.constraints.max_tokens == 0
        self._constraints, self.sampler = request.constraints, request.sampler()

    @property
    def running(self) -> list[Hypothesis]:
        """What to run next."""
        return [self.result]

    @property
    def result(self) -> Hypothesis:
        """What there is."""
        return Hypothesis(tuple(self.new), 0.0, self.ended or self.sampler.complete)

    def advance(self, logits: np.ndarray) -> list[int]:
        """Take the logits [1, V]."""
        self.take(self.sampler.pick(logits[0]))
        return [0]

    def take(self, id: int) -> None:
        """The sampler has picked `id`."""
        self.ended = id in self._constraints.ends
        if not self.ended:
            self.new.append(id)
        self.done = self.result.ended or self.sampler.new == self._constraints.max_tokens


def stream(runner: Runner, request: Request, result: Generation, decoder: Decoder) -> Generator[Piece, None, None]:
    """Fill `result` token by token; yields the text that became certain with each."""
    timing = Timing(len(request.prompt))
    text = TextStream(decoder(request), request.stops)
    search = OneByOne(request)
    if not search.done:
        limit = len(request.prefix) + request.constraints.max_tokens
        with runner.open(limit, request.prompt if runner.has_encoder else None) as sequence:
            for id in _tokens(sequence, request, search, timing):
                result.ids.append(id)
                yield result.add(Piece(text.push(id), id))
                if text.stopped:
                    break
    last = Piece(text.flush())
    result.finish_reason = "stop_string" if text.stopped else _reason(search.result, request)
    result.stats = timing.stats(result)
    yield result.add(last)


def _tokens(sequence, request, search, timing) -> Iterator[int]:
    ids = request.prefix
    while not search.done:
        search.advance(sequence.last(ids)[None])
        timing.token()
        ids = np.array(search.new[-1:], np.int32)
        if not search.ended:
            yield search.new[-1]


def together(runner: Runner, requests: Sequence[Request], decoder: Decoder) -> list[Generation]:
    """What each request generates, all of them in the same batches. A request does not notice the others."""
    waiting = deque(enumerate(requests))
    active: list[_Job] = []
    results: dict[int, Generation] = {}
    try:
        while waiting or active:
            _admit(runner, waiting, active, decoder)
            _step(runner, active)
            for job in [job for job in active if job.search.done]:
                results[job.index] = job.result()
                job.close()
                active.remove(job)
    finally:
        for job in active:
            job.close()
    return [results[index] for index in range(len(requests))]


class _Job:
    """A request that is running, with a sequence for each hypothesis of its search."""

    def __init__(self, runner: Runner, index: int, request: Request, decoder: Decoder):
        self.index, self.request, self.runner = index, request, runner
        self.text, self.generation = TextStream(decoder(request), request.stops), Generation()
        self.search = OneByOne(request) if request.beams is None else BeamSearch(
            request.beams, request.constraints, request.prefix, request.counted)
        self.timing = Timing(len(request.prompt))
        self.sequences = [runner.open(len(request.prefix) + request.constraints.max_tokens)]

    def parts(self) -> list[Part]:
        """What to run next: of each hypothesis the ids that its sequence lacks."""
        parts = []
        for sequence, hypothesis in zip(self.sequences, self.search.running, strict=True):
            ids = np.array([*self.request.prefix, *hypothesis.ids][sequence.length:], np.int32)
            ids = sequence.advance(ids)
            parts.append(Part(sequence, ids, np.array([len(ids) - 1], np.int32)))
        return parts

    def advance(self, logits: np.ndarray) -> None:
        """Take the logits [n, V] of the hypotheses, and give each new one its sequence."""
        parents = self.search.advance(logits)
        self.timing.token()
        if self.request.beams is None:
            self._write(self.search.result.ids)
            self.search.done |= self.text.stopped
        before, after = list(self.sequences), []
        for at, parent in enumerate(parents):
            if parent in parents[:at]:
                self.sequences.append(self.runner.fork(before[parent]))  # first here, so that close() finds it
                after.append(self.sequences[-1])
            else:
                after.append(before[parent])
        for sequence in self.sequences:
            if sequence not in after:
                sequence.close()
        self.sequences = after

    def _write(self, ids) -> None:
        """Bring ids and text of the generation up to `ids`."""
        for id in ids[len(self.generation.ids):]:
            self.generation.ids.append(id)
            self.generation.text += self.text.push(id)

    def result(self) -> Generation:
        """The finished generation."""
        best, result = self.search.result, self.generation
        self._write(best.ids)
        result.text += self.text.flush()
        result.finish_reason = "stop_string" if self.text.stopped else _reason(best, self.request)
        result.score = None if self.request.beams is None else best.score
        result.stats = self.timing.stats(result)
        return result

    def close(self) -> None:
        """Give the sequences' memory back."""
        for sequence in self.sequences:
            sequence.close()


def _reason(hypothesis: Hypothesis, request: Request) -> str:
    limits = request.constraints
    forced = limits.forced_last is not None and len(hypothesis.ids) + 1 == limits.max_tokens
    return "stop" if hypothesis.ended and not forced else "length"


def _admit(runner: Runner, waiting: deque, active: list[_Job], decoder: Decoder) -> None:
    """Start requests that wait, as many as fit; the encoder reads their texts side by side."""
    new: list[_Job] = []
    rows = 0
    width = sum(1 if job.request.beams is None else job.request.beams.num_beams for job in active)
    while waiting:
        index, request = waiting[0]
        rows += len(request.prompt)
        width += 1 if request.beams is None else request.beams.num_beams
        if (new and rows > BATCH_ROWS) or (active and width > MAX_BEAMS):
            break
        waiting.popleft()
        new.append(_Job(runner, index, request, decoder))
        active.append(new[-1])
    if new and runner.has_encoder:
        runner.encode([Part(job.sequences[0], job.request.prompt, np.zeros(0, np.int32)) for job in new], None)


def _step(runner: Runner, active: list[_Job]) -> None:
    """One more token for every hypothesis of every request."""
    jobs = [job for job in active if not job.search.done]
    parts = [job.parts() for job in jobs]
    if not jobs:
        return
    logits = runner.run([part for own in parts for part in own], "logits")
    ends = np.cumsum([len(own) for own in parts])
    for job, rows in zip(jobs, np.split(logits, ends[:-1]), strict=True):
        job.advance(rows)
