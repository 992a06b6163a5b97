"""Which of a request's texts are its results, where several were generated."""

from numflow.engine.request.beam import BeamSearch
from numflow.engine.run.generation import Generation
from numflow.engine.run.job import Job, Sample


def choices(job: Job) -> list[Generation]:
    """The n results of a job that has ended: its samples, the n most probable of them, or the best beams."""
    request = job.request
    if request.beams is not None or len(job.samples) <= request.n:
        return job.results
    return [sample.generation for sample in sorted(job.samples, key=_mean, reverse=True)[:request.n]]


def _mean(sample: Sample) -> float:
    """Mean log-probability of a sample's tokens, an end token included."""
    assert not isinstance(sample.search, BeamSearch)
    found = [one.logprob for one in sample.search.sampler.logprobs]
    return sum(found) / len(found) if found else float("-inf")
