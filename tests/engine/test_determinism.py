"""Determinism: a request's tokens and log-probabilities are the same bits alone, in any batch, and after preemption.

Schedules are drawn by hypothesis: who comes when, how much memory and how many tokens a step has, who is cancelled.
"""

import json
from collections import Counter
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.request.settings import Settings
from numflow.engine.run.job import Job
from numflow.engine.schedule.scheduler import StepLimits
from tests.engine.fake import used_blocks
from tests.engine.tiny import CONFIG, write_checkpoint

SHARED = [7 + i * 5 % 43 for i in range(150)]  # two blocks and some
PROMPTS = [[5], SHARED[:64], SHARED[:140], [*SHARED, 4], SHARED[:129], list(range(1, 40)), [9] * 70, SHARED[:100]]
DECODING = [{}, {"temperature": 0.9, "seed": 11, "logprobs": 0}, {"num_beams": 3}, {"ignore_eos": True},
            {"temperature": 1.3, "seed": 2, "n": 3, "top_k": 20}, {"repetition_penalty": 1.3},
            {"speculate": "ngram", "ignore_eos": True}, {"temperature": 0.8, "seed": 5, "speculate": "ngram"},
            {"temperature": 1.1, "seed": 8}, {"temperature": 0.9, "seed": 6, "top_p": 0.9, "ignore_eos": True}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The tiny decoder with a context of four blocks, on one thread and on two."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 256}))
    made = {threads: load(folder, activations="f32", threads=threads) for threads in (1, 2)}
    yield made
    for model in made.values():
        model.close()


def fresh(model, chunk=512):
    """The model with nothing in its memory."""
    return Model(model.network, model.program, ends=frozenset({2, 3}), chunk=chunk)


def facts(job):
    return [(one.ids, one.finish_reason, one.score, one.logprobs) for one in job.results]


@cache
def alone(model, prompt, decoding, new):
    model = fresh(model)
    job = job_of(model, prompt, decoding, new)
    model.core.drive(model.core.submit(job))
    return facts(job)


def job_of(model, prompt, decoding, new, priority=0):
    made = model.request(PROMPTS[prompt], Settings(max_tokens=new, **DECODING[decoding]))
    return Job(made, model.text_decoder, made.samples, priority, drafters=model.core.drafters)


requests = st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(DECODING) - 1),
                              st.sampled_from([1, 5, 70]), st.integers(0, 2),
                              st.integers(0, 12), st.one_of(st.none(), st.integers(0, 30))), min_size=1, max_size=7)
limits = st.builds(StepLimits, sequences=st.sampled_from([1, 3, 8, 32]), tokens=st.sampled_from([4, 37, 100, 512]),
                   batching=st.sampled_from(["dynamic", "dynamic", "static"]),
                   preemption=st.sampled_from(["swap", "recompute"]))


COMPANY = [(2, 3 * (1 + number % 2), 70, number % 2, number, None) for number in range(5)]  # long, and some drafted


@pytest.mark.merge
def test_random_schedules_change_no_bit(loaded):
    happened = Counter()

    # Whatever is drawn: too little memory for all of them, and enough where they share what they begin with.
    @example(coming=COMPANY, limits=StepLimits(sequences=8, tokens=100), blocks=12, prefix=False, chunk=64, threads=2)
    @example(coming=COMPANY, limits=StepLimits(sequences=8, tokens=100), blocks=12, prefix=True, chunk=64, threads=1)
    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(coming=requests, limits=limits, blocks=st.sampled_from([None, 12, 16]), prefix=st.booleans(),
           chunk=st.sampled_from([7, 30, 64, 512]), threads=st.sampled_from([1, 2]))
    def run(coming, limits, blocks, prefix, chunk, threads):
        happened.update(run_schedule(loaded, coming, limits, blocks, prefix, chunk, threads))

    run()
    assert all(happened[name] for name in ("preemptions", "swaps", "prefix_tokens", "accepted_drafts")), happened


def run_schedule(loaded, coming, limits, blocks, prefix, chunk, threads):
    """Compare each request with the same one alone; return counts of what the schedule did."""
    expected = [alone(loaded[1], *one[:3]) for one in coming]
    model = fresh(loaded[threads], chunk)
    core, jobs, step = model.core, {}, 0
    core.open(limits, blocks, 64 if prefix else 0)
    while len(jobs) < len(coming) or core.busy:
        for number, (*what, priority, arrival, _) in enumerate(coming):
            if number not in jobs and (step >= arrival or not core.busy):
                jobs[number] = core.submit(job_of(model, *what, priority))
        for number, one in enumerate(coming):
            if one[-1] == step and number in jobs:
                core.cancel(jobs[number])
        core.step()
        step += 1
    for number, job in jobs.items():
        assert job.error is None
        for (ids, reason, *rest), wanted in zip(facts(job), expected[number], strict=True):
            if reason == "cancelled":
                assert ids == wanted[0][:len(ids)]
            else:
                assert (ids, reason, *rest) == wanted
    core.scheduler.swap_space.settle()
    assert used_blocks(model) == core.host.allocator.used == 0
    return {"accepted_drafts": core.counts["accepted_drafts"],
            **{name: core.scheduler.counts[name] for name in ("preemptions", "swaps", "prefix_tokens")}}
