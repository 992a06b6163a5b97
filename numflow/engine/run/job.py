"""A request on its way: its samples, their text, and what is told to whoever waits."""

import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np

from numflow.decoding.choice import Choice
from numflow.decoding.logprobs import TokenLogprob
from numflow.decoding.speculative import MAX_DRAFTS
from numflow.engine.request.beam import BeamSearch, Hypothesis
from numflow.engine.request.request import Request
from numflow.engine.run.generation import Generation, Piece, TextStream, Timing
from numflow.engine.run.search import Search, searches
from numflow.engine.schedule.prefix import START
from numflow.engine.schedule.sequence import NO_ADAPTER, Sequence, SequenceGroup
from numflow.engine.speculate.drafters import Drafters

Decoder = Callable[[Request], Any]  # what turns a request's new ids into text, or None without a tokenizer
SINKS = 4  # first tokens of a text, which attention leans on: they stay where the older half goes
Sink = Callable[[Piece | None], None]  # told each piece, and None at the end


class Sample:
    """One text of a request, with a sequence for each hypothesis of its search. context: see Request."""

    def __init__(self, search: Search, text: TextStream, timing: Timing, index: int, emit: Sink, context: int = 0):
        self.search, self.text, self.timing, self.index = search, text, timing, index
        self.generation = Generation()
        self.sequences: list[Sequence] = []
        self.done, self._context = search.done, context
        self.drafts = self.accepted = 0
        self._emit = emit

    def propose(self, limit: int) -> None:
        """Let the sequence run drafts in the next step."""
        if isinstance(self.search, BeamSearch) or self.done:
            return
        sequence, = self.sequences
        if sequence.pending > 1:  # what it knows has to run first
            return
        sequence.drafts = [int(id) for id in self.search.propose(min(MAX_DRAFTS, limit - 1 - len(sequence.ids)))]

    def choices(self, drafts: Ids[int]) -> list[Choice] | None:
        """Draws with which a device picks the next tokens; None if a device cannot."""
        return None if isinstance(self.search, BeamSearch) else self.search.choices(drafts)

    def steps_ahead(self, most: int) -> int:
        """Number of tokens, up to `most`, that a device can pick in one go; 0: it cannot."""
        if isinstance(self.search, BeamSearch):
            return 0
        if self._context:
            most = min(most, max(1, self._context - len(self.sequences[0].ids)))
        return self.search.sampler.steps_ahead(most)

    def advance(self, rows: np.ndarray, drafts: Ids[int], scheduler) -> None:
        """Take the logits [n, V] of the sequences, or the tokens [n] picked by `choices`, and give each new hypothesis
        its sequence with its new token."""
        self.timing.token()
        if isinstance(self.search, BeamSearch):
            self._branch(self.search.advance(rows), scheduler)
        else:
            before, picked = len(self.search.new), self.search.sampler.new
            self.search.advance(rows, drafts)
            self.drafts += len(drafts)
            self.accepted += self.search.sampler.new - picked - 1
            new, (sequence,) = self.search.new[before:], self.sequences
            sequence.ids += new
            self._write(new)
            self.done = self.search.done or self.text.stopped
            if len(drafts) and not self.done:
                scheduler.accept(sequence, len(new) - 1)
            if not self.done and self._context and len(sequence.ids) >= self._context:
                scheduler.shift(sequence, SINKS, (len(sequence.ids) - SINKS) // 2)
        if self.done:
            self.drop(scheduler)

    def _branch(self, parents: Ids[int], scheduler) -> None:
        before, after = list(self.sequences), []
        for at, parent in enumerate(parents):
            if parent in parents[:at]:
                self.sequences.append(scheduler.fork(before[parent]))  # before it gets its next token
                after.append(self.sequences[-1])
            else:
                after.append(before[parent])
        for sequence in self.sequences:
            if sequence not in after:
                scheduler.drop(sequence)
        self.sequences, self.done = after, self.search.done
        for sequence, hypothesis in zip(after, self.search.running, strict=True):
            sequence.ids.append(hypothesis.ids[-1])

    def drop(self, scheduler) -> None:
        """Give the sequences back."""
        for sequence in self.sequences:
            scheduler.drop(sequence)
        self.sequences = []

    def _write(self, ids: Ids[int]) -> None:
        """Add ids and their text to the generation, up to a stop string."""
        for id in ids:
            if self.text.stopped:
                break
            logprob = self._logprob(len(self.generation.ids))
            self.generation.ids.append(id)
            self._emit(self.generation.add(Piece(self.text.push(id), id, self.index, logprob)))

    def _logprob(self, place: int) -> TokenLogprob | None:
        if isinstance(self.search, BeamSearch) or self.search.sampler.settings.logprobs is None:
            return None
        found = self.search.sampler.logprobs[place]
        self.generation.logprobs = [*(self.generation.logprobs or []), found]
        return found

    def finish(self, request: Request, reason: str | None = None) -> Generation:
        """The finished generation; `reason` in place of its own."""
        best, result = self.search.result, self.generation
        if isinstance(self.search, BeamSearch):
            if reason is None:
                self._write(best.ids)
                result.score = best.score
        else:
            self.search.close()
        if result.finish_reason is None:
            result.prompt, result.prompt_logprobs = request.echo, request.prompt_logprobs
            result.ignored = request.ignored
            self._emit(result.add(Piece(self.text.flush(), None, self.index)))
            result.stop_string = self.text.stop
            result.finish_reason = reason or ("stop_string" if self.text.stopped else reason_of(best, request))
            result.stats = self.timing.stats(result)
            if self.drafts:
                result.stats |= {"drafts": self.drafts, "accepted_drafts": self.accepted,
                                 "acceptance_rate": self.accepted / self.drafts}
        return result


def _mean(sample: Sample) -> float:
    """Mean log-probability of a sample's tokens, an end token included."""
    assert not isinstance(sample.search, BeamSearch)
    found = [one.logprob for one in sample.search.sampler.logprobs]
    return sum(found) / len(found) if found else float("-inf")


def reason_of(hypothesis: Hypothesis, request: Request) -> str:
    """Finish reason without a stop string: "stop" or "length"."""
    limits = request.constraints
    forced = limits.forced_last is not None and len(hypothesis.ids) + 1 == limits.max_tokens
    return "stop" if hypothesis.ended and not forced else "length"


class Job:
    """A request for `count` samples.

    drafters: make the drafters of its samples; None: no tokens are drafted.
    sink: called from the thread that runs the steps, with each piece as it comes and with None at the end.
    done: set when it has ended. error: what ended it, if it was no good end. started: time.perf_counter() when it first
    ran.
    """

    def __init__(self, request: Request, decoder: Decoder, count: int = 1, priority: int = 0,
                 sink: Sink = lambda piece: None, drafters: Drafters | None = None):
        self.request, self.decoder, self.sink = request, decoder, sink
        self.error: BaseException | None = None
        self.encoder_ids = request.prompt
        self.started: float | None = None
        self.done, self._tallied = threading.Event(), [0, 0, 0]
        self.samples = [Sample(search, TextStream(decoder(request), request.stops), Timing(len(request.prompt)), index,
                               sink, request.context)
                        for index, search in enumerate(searches(request, count, drafters))]
        self._drafts = any(not isinstance(sample.search, BeamSearch) and sample.search.drafts
                           for sample in self.samples)
        self._others = [Generation() for _ in range(request.n - 1)] if request.beams else []
        prefix = request.prefix.tolist()
        width = request.beams.num_beams if request.beams else count
        read = tuple(request.prompt.tolist()) if request.encoder else ()
        own = request.adapter  # whose keys and values are found again by requests with the same one only
        self.group = SequenceGroup(prefix, request.reach, width, priority, len(read),
                                   root=(START, request.shared, read, *([] if own is None else [own.serial])),
                                   adapter=NO_ADAPTER if own is None else own.number)

    def run(self) -> None:
        """Tokens of it run in this step; they have no types."""
        self.started = self.started or time.perf_counter()

    def text(self) -> list[int]:
        """Prompt and first sample, as far as they have run, of a text that others may go on from."""
        ids = [] if self.request.encoder else [*self.group.prompt, *self.samples[0].generation.ids]
        return [] if self.request.context and len(ids) > self.request.context else ids

    def take(self, rows: np.ndarray, end: int | None = None) -> None:
        """An encoder's output is not for it."""
        raise TypeError("a job has no use for an encoder's output")

    @property
    def results(self) -> list[Generation]:
        """The samples as far as generated; of a beam search, the wanted texts, best first."""
        return [*(sample.generation for sample in self.samples), *self._others]

    @property
    def choices(self) -> list[Generation]:
        """The n results of a job that has ended: its samples, the n most probable of them, or the best beams."""
        if self.request.beams is not None or len(self.samples) <= self.request.n:
            return self.results
        return [sample.generation for sample in sorted(self.samples, key=_mean, reverse=True)[:self.request.n]]

    def tally(self) -> dict[str, int]:
        """New tokens, drafts that ran and drafts that were right, since the last call."""
        now = [sum(len(sample.generation.ids) for sample in self.samples),
               sum(sample.drafts for sample in self.samples), sum(sample.accepted for sample in self.samples)]
        before, self._tallied = self._tallied, now
        return dict(zip(("new_tokens", "drafts", "accepted_drafts"), (a - b for a, b in zip(now, before))))

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.done for sample in self.samples)

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """Name, begin and end (time.perf_counter()) of what it has gone through so far: queue, prefill, decode."""
        timing, now = self.samples[0].timing, time.perf_counter()
        if self.started is None:
            return [("queue", timing.begin, now)]
        found = [("queue", timing.begin, self.started), ("prefill", self.started, timing.first or now)]
        if timing.first is not None:
            found.append(("decode", timing.first, max(sample.timing.last or 0.0 for sample in self.samples)))
        return found

    def propose(self) -> None:
        """Let the samples draft tokens."""
        for sample in self.samples if self._drafts else ():
            if sample.sequences:
                sample.propose(self.group.limit)

    @property
    def listens(self) -> bool:
        """Whether a sample's drafter wants to be told of the model's streams."""
        return self._drafts and any(not isinstance(sample.search, BeamSearch) and sample.search.listens
                                    for sample in self.samples)

    def saw(self, sequence: Sequence, start: int, rows: np.ndarray) -> None:
        """Tell the drafters of a sequence's samples, of all before they part; see Drafter.saw."""
        for sample in self.samples:
            if not isinstance(sample.search, BeamSearch) and (sequence in sample.sequences or not sample.sequences) \
                    and not sample.done:
                sample.search.saw(start, sequence.ids, rows)

    def device_choices(self, sequence: Sequence, drafts: Ids[int]) -> list[Choice] | None:
        """Draws for a sequence: one behind its last token and one behind each draft.

        None if a device cannot draw, or if several samples start from the same row.
        """
        found = [sample for sample in self.samples if sequence in sample.sequences] or self.samples
        return found[0].choices(drafts) if len(found) == 1 else None

    def steps_ahead(self, sequence: Sequence, most: int) -> int:
        """As Sample.steps_ahead."""
        if self._drafts:
            return 0
        return next((sample.steps_ahead(most) for sample in self.samples if sequence in sample.sequences), 0)

    def choice(self, sequence: Sequence, steps: int) -> Choice:
        """The parameters with which a device picks so many tokens of a sequence in one go, up to `steps_ahead`."""
        search = next(sample.search for sample in self.samples if sequence in sample.sequences)
        assert not isinstance(search, BeamSearch)
        found = search.sampler.choice(steps=steps)
        assert found is not None
        return found

    def advance(self, rows: Mapping[Sequence, tuple[np.ndarray, Ids[int]]], scheduler) -> None:
        """Take sequence -> (logits [n, V] or tokens [n] as in Sample.advance, the drafts that ran) of all sequences of
        the request."""
        if not any(sample.sequences for sample in self.samples):  # the prompt has run: every sample starts from it
            root, = rows
            sequences = [root, *(scheduler.fork(root) for _ in self.samples[1:])]
            rows = dict.fromkeys(sequences, rows[root])
            for sample, sequence in zip(self.samples, sequences):
                sample.sequences = [sequence]
        for sample in self.samples:
            if sample.sequences:
                own = [rows[sequence] for sequence in sample.sequences]
                logits = own[0][0] if len(own) == 1 else np.concatenate([logits for logits, _ in own])
                sample.advance(logits, own[0][1], scheduler)

    def end(self, reason: str | None = None, error: BaseException | None = None) -> None:
        """Complete the results and wake whoever waits. reason: why, if the samples did not end by themselves."""
        if self.done.is_set():
            return
        self.error = error
        for sample in self.samples:
            sample.finish(self.request, None if sample.done else reason).stats["cached_tokens"] = self.group.reused
        if self._others:
            self._finish_others()
        self.done.set()
        self.sink(None)

    def _finish_others(self) -> None:
        """Write the texts of a beam search behind the best one; there may be fewer than were asked for."""
        sample, = self.samples
        assert isinstance(sample.search, BeamSearch)
        best = sample.generation
        del self._others[max(0, len(sample.search.finished) - 1):]
        for index, (result, hypothesis) in enumerate(zip(self._others, sample.search.finished[1:]), 1):
            text = TextStream(self.decoder(self.request))
            if sample.done:
                result.ids, result.score = list(hypothesis.ids), hypothesis.score
                for id in (*result.ids, None):
                    self.sink(result.add(Piece(text.flush() if id is None else text.push(id), id, index)))
            result.finish_reason = reason_of(hypothesis, self.request) if sample.done else best.finish_reason
            result.stats, result.prompt, result.ignored = best.stats, best.prompt, best.ignored
