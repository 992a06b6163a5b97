"""The event simulator against schedules worked out by hand."""

from dataclasses import replace

import pytest

from numflow.partition.price.events import Collective, Receive, Send, Simulator, Work
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link

DEVICES = {name: DeviceSpec("d", 1e9, 1e9, 1e9) for name in "01"}
CLUSTER = Cluster("two", DEVICES, Link(bandwidth=100.0, latency=0.5))


def simulate(cluster, *jobs, again=()):
    ended, rest = {}, list(again)

    def done(job, now):
        ended[job] = now
        if rest:
            simulator.issue(rest.pop(0))

    simulator = Simulator(cluster, done)
    for job in jobs:
        simulator.issue(job)
    simulator.run()
    return simulator, ended


def test_work_adds_up():
    _, ended = simulate(CLUSTER, {"0": [Work.of(2, 1), Work(((0, 1, 2), (1, 0.5, 1)))]})
    assert ended == {0: pytest.approx(5)}


def test_a_message_takes_latency_and_bandwidth():
    _, ended = simulate(CLUSTER, {"0": [Work.of(1, 0), Send("1", 100)], "1": [Receive("0"), Work.of(2, 0)]})
    assert ended == {0: pytest.approx(1 + 0.5 + 1 + 2)}


def test_messages_of_one_link_wait_for_each_other():
    job = {"0": [Send("1", 100)], "1": [Receive("0")]}
    _, ended = simulate(CLUSTER, job, job)
    assert ended == {0: pytest.approx(1.5), 1: pytest.approx(2.5)}


def test_two_stages_overlap_two_jobs():
    job = {"0": [Work.of(1, 0), Send("1", 0)], "1": [Receive("0"), Work.of(1, 0)]}
    simulator, ended = simulate(CLUSTER, job, job)
    assert ended == {0: pytest.approx(2.5), 1: pytest.approx(3.5)}
    assert simulator.busy == {"0": pytest.approx(2), "1": pytest.approx(2)}


def test_a_collective_waits_for_the_slowest():
    group = Collective(("0", "1"), 0.25)
    simulator, ended = simulate(CLUSTER, {"0": [Work.of(1, 0), group, Work.of(1, 0)], "1": [Work.of(3, 0), group]})
    assert ended == {0: pytest.approx(4.25)}
    spans = [(s.device, s.begin, s.end, s.what) for s in simulator.spans]
    assert ("0", 1.0, 3.0, "wait") in spans
    assert ("0", 3.0, 3.25, "exchange") in spans
    assert ("1", 3.0, 3.25, "exchange") in spans


def test_devices_of_one_host_share_its_cores_and_memory():
    shared = replace(CLUSTER, cores=1)
    _, ended = simulate(shared, {"0": [Work.of(0, 1)], "1": [Work.of(0, 2)]})
    assert ended == {0: pytest.approx(3)}
    shared = replace(CLUSTER, cores=2, host_bandwidth=1.5e9)
    _, ended = simulate(shared, {"0": [Work.of(1, 0)], "1": [Work.of(1, 0)]})
    assert ended == {0: pytest.approx(4 / 3)}


def test_jobs_may_follow_jobs_and_start_at_a_time():
    _, ended = simulate(CLUSTER, {"0": [Work.of(1, 0)]}, again=[{"0": [Work.of(2, 0)]}])
    assert ended == {0: pytest.approx(1), 1: pytest.approx(3)}
    late = Simulator(CLUSTER, lambda job, now: None)
    late.at(5, lambda: late.issue({"1": [Work.of(1, 0)]}))
    assert late.run() == pytest.approx(6)


def test_scripts_that_do_not_fit_are_found():
    with pytest.raises(RuntimeError, match="1 wait for each other"):
        simulate(CLUSTER, {"1": [Receive("0")]})
