"""A running request: its samples, their texts, and the pieces passed to the caller."""

import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np

from numflow.decoding.choice import Choice
from numflow.decoding.logprobs import TokenLogprob
from numflow.decoding.speculative import MAX_DRAFTS
from numflow.engine.request.adapter import text_adapter
from numflow.engine.request.beam import BeamSearch, Hypothesis
from numflow.engine.request.request import Request
from numflow.engine.run.generation import Generation, Piece, TextStream, Timing
from numflow.engine.run.search import Search, searches
from numflow.engine.schedule.prefix import START
from numflow.engine.schedule.sequence import Sequence, SequenceGroup
from numflow.engine.speculate.drafters import Drafters

Decoder = Callable[[Request], Any]  # returns the incremental detokenizer of a request, or None without a tokenizer
SINKS = 4  # attention sinks: first tokens of a text, which stay when the older half is dropped
Sink = Callable[[Piece | None], None]  # called with each piece, and with None at the end


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
        """Draft tokens for the next step."""
        if isinstance(self.search, BeamSearch) or self.done:
            return
        sequence, = self.sequences
        if sequence.pending > 1:  # tokens of the text have to run first
            return
        sequence.drafts = [int(id) for id in self.search.propose(min(MAX_DRAFTS, limit - 1 - len(sequence.ids)))]

    def choices(self, drafts: Ids[int]) -> list[Choice] | None:
        """Parameters for sampling the next tokens on a device; None if a device cannot sample them."""
        return None if isinstance(self.search, BeamSearch) else self.search.choices(drafts)

    def steps_ahead(self, most: int) -> int:
        """Number of tokens, up to `most`, that a device can sample in one run; 0: none."""
        if isinstance(self.search, BeamSearch):
            return 0
        if self._context:
            most = min(most, max(1, self._context - len(self.sequences[0].ids)))
        return self.search.sampler.steps_ahead(most)

    def advance(self, rows: np.ndarray, drafts: Ids[int], scheduler) -> None:
        """Take the logits [n, V] of the sequences, or the tokens [n] picked by `choices`, and append the new token of
        each hypothesis to its sequence."""
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
        for index, parent in enumerate(parents):
            if parent in parents[:index]:
                self.sequences.append(scheduler.fork(before[parent]))  # before the parent gets its next token
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
        """Release the sequences."""
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

    def _logprob(self, index: int) -> TokenLogprob | None:
        if isinstance(self.search, BeamSearch) or self.search.sampler.settings.logprobs is None:
            return None
        found = self.search.sampler.logprobs[index]
        self.generation.logprobs = [*(self.generation.logprobs or []), found]
        return found

    def finish(self, request: Request, reason: str | None = None) -> Generation:
        """Finish the generation. reason: overrides the finish reason."""
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
    found = [token.logprob for token in sample.search.sampler.logprobs]
    return sum(found) / len(found) if found else float("-inf")


def reason_of(hypothesis: Hypothesis, request: Request) -> str:
    """Finish reason without a stop string: "stop" or "length"."""
    limits = request.constraints
    forced = limits.forced_last is not None and len(hypothesis.ids) + 1 == limits.max_tokens
    return "stop" if hypothesis.ended and not forced else "length"


class Job:
    """A running request with `count` samples.

    drafters: factory of the drafters of its samples; None: no speculative decoding.
    sink: called from the thread that runs the steps, with each piece and with None at the end.
    done: set when the job has ended. error: the error that ended it, if any. started: time.perf_counter() of its first
    step.
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
        self._other_beams = [Generation() for _ in range(request.n - 1)] if request.beams else []
        prefix = request.prefix.tolist()
        width = request.beams.num_beams if request.beams else count
        read = tuple(request.prompt.tolist()) if request.encoder else ()
        adapter = text_adapter(request.adapter, prefix)
        self.group = SequenceGroup(prefix, request.max_length, width, priority, len(read),
                                   root=(START, request.cache_key, read, *adapter.serials),
                                   adapter=adapter.number, adapter_start=adapter.start)

    def run(self) -> None:
        """Note that tokens run in this step; they have no token types."""
        self.started = self.started or time.perf_counter()

    def text(self) -> list[int]:
        """Tokens of the prompt and the first sample, for the prefix cache; [] if no other text can continue from
        them."""
        ids = [] if self.request.encoder else [*self.group.prompt, *self.samples[0].generation.ids]
        return [] if self.request.context and len(ids) > self.request.context else ids

    def take(self, rows: np.ndarray, end: int | None = None) -> None:
        """Raise TypeError: a job does not read the encoder's output."""
        raise TypeError("a job has no use for an encoder's output")

    @property
    def results(self) -> list[Generation]:
        """The samples so far; of a beam search, the n texts, best first."""
        return [*(sample.generation for sample in self.samples), *self._other_beams]

    @property
    def choices(self) -> list[Generation]:
        """The n results of a finished job: all samples, the n most probable samples, or the best beams."""
        if self.request.beams is not None or len(self.samples) <= self.request.n:
            return self.results
        return [sample.generation for sample in sorted(self.samples, key=_mean, reverse=True)[:self.request.n]]

    def tally(self) -> dict[str, int]:
        """Numbers of new tokens, of drafts that ran and of accepted drafts since the last call."""
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
        """Name, begin and end (time.perf_counter()) of the phases so far: queue, prefill, decode."""
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
    def needs_streams(self) -> bool:
        """Whether a sample's drafter needs the residual streams of the model."""
        return self._drafts and any(not isinstance(sample.search, BeamSearch) and sample.search.needs_streams
                                    for sample in self.samples)

    def observe(self, sequence: Sequence, start: int, rows: np.ndarray) -> None:
        """Pass residual streams to the drafters of a sequence's samples, or of all samples before they diverge; see
        Drafter.observe."""
        for sample in self.samples:
            if not isinstance(sample.search, BeamSearch) and (sequence in sample.sequences or not sample.sequences) \
                    and not sample.done:
                sample.search.observe(start, sequence.ids, rows)

    def device_choices(self, sequence: Sequence, drafts: Ids[int]) -> list[Choice] | None:
        """Sampling parameters of a sequence: after its last token and after each draft.

        None if a device cannot sample, or if several samples start from the same row.
        """
        found = [sample for sample in self.samples if sequence in sample.sequences] or self.samples
        return found[0].choices(drafts) if len(found) == 1 else None

    def steps_ahead(self, sequence: Sequence, most: int) -> int:
        """As Sample.steps_ahead."""
        if self._drafts:
            return 0
        return next((sample.steps_ahead(most) for sample in self.samples if sequence in sample.sequences), 0)

    def choice(self, sequence: Sequence, steps: int) -> Choice:
        """Parameters for sampling `steps` tokens of a sequence on a device in one run, up to `steps_ahead`."""
        search = next(sample.search for sample in self.samples if sequence in sample.sequences)
        assert not isinstance(search, BeamSearch)
        found = search.sampler.choice(steps=steps)
        assert found is not None
        return found

    def advance(self, rows: Mapping[Sequence, tuple[np.ndarray, Ids[int]]], scheduler) -> None:
        """Take sequence -> (logits [n, V] or tokens [n] as in Sample.advance, the drafts that ran) of all sequences of
        the request."""
        if not any(sample.sequences for sample in self.samples):  # the prompt has run: samples fork
            root, = rows
            sequences = [root, *(scheduler.fork(root) for _ in self.samples[1:])]
            rows = dict.fromkeys(sequences, rows[root])
            for sample, sequence in zip(self.samples, sequences):
                sample.sequences = [sequence]
        for sample in self.samples:
            if sample.sequences:
                results = [rows[sequence] for sequence in sample.sequences]
                logits = results[0][0] if len(results) == 1 else np.concatenate([logits for logits, _ in results])
                sample.advance(logits, results[0][1], scheduler)

    def end(self, reason: str | None = None, error: BaseException | None = None) -> None:
        """Complete the results and wake waiting threads. reason: finish reason of samples that have not ended
        themselves."""
        if self.done.is_set():
            return
        self.error = error
        for sample in self.samples:
            sample.finish(self.request, None if sample.done else reason).stats["cached_tokens"] = self.group.reused
        if self._other_beams:
            self._finish_other_beams()
        self.done.set()
        self.sink(None)

    def _finish_other_beams(self) -> None:
        """Write the texts of a beam search after the best one; there may be fewer than n."""
        sample, = self.samples
        assert isinstance(sample.search, BeamSearch)
        best = sample.generation
        del self._other_beams[max(0, len(sample.search.finished) - 1):]
        for index, (result, hypothesis) in enumerate(zip(self._other_beams, sample.search.finished[1:]), 1):
            text = TextStream(self.decoder(self.request))
            if sample.done:
                result.ids, result.score = list(hypothesis.ids), hypothesis.score
                for id in (*result.ids, None):
                    self.sink(result.add(Piece(text.flush() if id is None else text.push(id), id, index)))
            result.finish_reason = reason_of(hypothesis, self.request) if sample.done else best.finish_reason
            result.stats, result.prompt, result.ignored = best.stats, best.prompt, best.ignored
