"""Simulated serving, by scripts with fixed durations."""

import pytest

from numflow.errors import RequestError
from numflow.partition.price.events import Receive, Send, Work
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link
from numflow.partition.price.serving import Queries, SimulatedEngine, simulate

CLUSTER = Cluster("two", {name: DeviceSpec("d", 1e9, 1e9, 1e9) for name in "01"}, Link(1e9, 0.0))


def one_stage(loads):
    """One second per batch, whatever its content."""
    return {"0": [Work.of(1, 0)]}


def two_stages(loads):
    return {"0": [Work.of(1, 0), Send("1", 0)], "1": [Receive("0"), Work.of(1, 0)]}


def test_one_query_after_the_other():
    outcome = simulate(CLUSTER, one_stage, Queries(3, prompt=10, new=4))
    assert outcome.seconds == pytest.approx(12)
    assert outcome.throughput == pytest.approx(1)
    assert outcome.speed == pytest.approx(1)
    assert outcome.first == pytest.approx(1)
    assert outcome.latencies == pytest.approx((4, 4, 4))


def test_a_batch_holds_many():
    outcome = simulate(CLUSTER, one_stage, Queries(8, prompt=10, new=4, at_once=8))
    assert outcome.seconds == pytest.approx(4)
    assert simulate(CLUSTER, one_stage, Queries(8, 10, 4, 8), SimulatedEngine(max_batch=4)).seconds == pytest.approx(8)


def test_long_prompts_are_cut():
    seen = []

    def scripts(loads):
        seen.append([(load.sequences, load.new, load.cached, load.wanted) for load in loads])
        return one_stage(loads)

    simulate(CLUSTER, scripts, Queries(2, prompt=10, new=2, at_once=2), SimulatedEngine(chunk=8))
    assert seen == [[(1, 8, 0, 0)], [(1, 2, 8, 1), (1, 6, 0, 0)], [(1, 4, 6, 1), (1, 1, 10, 1)], [(1, 1, 10, 1)]]


def test_lanes_fill_the_stages():
    queries = Queries(8, prompt=1, new=10, at_once=8)
    alone = simulate(CLUSTER, two_stages, queries)
    overlapped = simulate(CLUSTER, two_stages, queries, SimulatedEngine(lanes=2))
    assert alone.seconds == pytest.approx(20)
    assert overlapped.seconds == pytest.approx(21)  # twice the batches of half the size
    assert alone.busy == pytest.approx({"0": 0.5, "1": 0.5})
    assert overlapped.busy["0"] == pytest.approx(20 / 21)


def test_queries_at_random_times_all_end():
    outcome = simulate(CLUSTER, two_stages, Queries(50, 5, 3, rate=0.2, seed=1), SimulatedEngine(lanes=2), record=True)
    assert len(outcome.latencies) == 50
    assert min(outcome.latencies) == pytest.approx(6)
    assert {span.device for span in outcome.spans} == {"0", "1"}


@pytest.mark.parametrize("given", [{"count": 0}, {"count": 1, "new": 0}, {"count": 1, "prompt": 0},
                                   {"count": 1, "at_once": 0}, {"count": 1, "rate": 0.0}])
def test_no_load_is_refused(given):
    with pytest.raises(RequestError, match=f"{list(given)[-1]} of simulated queries should be"):
        Queries(**given)
