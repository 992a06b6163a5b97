"""Prices computed by hand, and rankings of strategies on clusters where the ranking is known."""

from dataclasses import replace

import pytest

from numflow.errors import DeviceError, RequestError
from numflow.lab.shapes import find_shape, random_network
from numflow.network.cost import Workload, weight_bytes
from numflow.partition.cut.cut import partition
from numflow.partition.price.drawing import draw, exchanges
from numflow.partition.price.events import Collective, Receive, Send, Simulator, Work
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link
from numflow.partition.price.planner import Goal, decode_rate, prefill_seconds, rank, strategies
from numflow.partition.price.price import INFERFLOW, NUMFLOW, Prices, kind_of

NETWORK, _ = random_network(find_shape("7b", layers=8), "F16", fuse=False)
GPU = DeviceSpec("gpu", 16e9, 800e9, 80e12, 4e-6)
CLUSTER = Cluster("four", {str(i): GPU for i in range(4)}, Link(11e9, 10e-6))


def prices(devices: str, style=NUMFLOW, cluster=CLUSTER) -> Prices:
    return Prices(partition(NETWORK, devices), cluster, style)


def test_one_device_reads_all_weights_for_a_token():
    [work] = prices("0").scripts([Workload(1, 1, 0)])["0"]
    matrices = [w for w in NETWORK.weights.values() if len(w.shape) == 2 and "embd" not in w.name]
    least = sum(map(weight_bytes, matrices)) / GPU.bandwidth
    assert least < work.seconds() < 1.2 * least


def test_a_batch_reads_weights_once():
    one, many = (sum(item.seconds() for item in prices("0").scripts([Workload(n)])["0"]) for n in (1, 16))
    assert many < 1.3 * one
    mixed = sum(item.seconds() for item in prices("0").scripts([Workload(16), Workload(1, 16)])["0"])
    assert mixed < 1.3 * many


def test_scripts_have_the_exchanges_of_the_plan():
    scripts = prices("0;1").scripts([Workload(2, 3)])
    sent, received = scripts["0"][-1], scripts["1"][0]
    assert sent == Send("1", 2 * 3 * 4096 * 4)
    assert received == Receive("0")
    scripts = prices("0&1").scripts([Workload(1)])
    meetings = [item for item in scripts["0"] if isinstance(item, Collective)]
    assert meetings == [item for item in scripts["1"] if isinstance(item, Collective)]
    assert len(meetings) == 8 * 2 + 2
    assert all(isinstance(item, Work) for item in scripts["0"] if item not in meetings)


def test_a_ring_beats_a_star():
    ours, theirs = prices("0&1&2&3"), prices("0&1&2&3", INFERFLOW)
    for size in (1e3, 1e5, 1e7):
        assert ours.reduce_seconds("0123", 4, size) < theirs.reduce_seconds("0123", 4, size)
    large = 1e9
    assert ours.reduce_seconds("0123", 4, large) == pytest.approx(2 * 3 / 4 * large / 11e9, rel=1e-3)


def test_a_device_waits_for_the_pieces_of_others_only():
    """The device with the smallest piece receives most: all other pieces."""
    ours, link = prices("0&1&2&3"), CLUSTER.link
    for pieces in ((1e6, 1e6), (1e6, 3e6), (5e6, 0.0), (4e6, 2e6, 1e6, 3e6)):
        group = "0123"[:len(pieces)]
        expected = link.latency + (sum(pieces) - min(pieces)) / link.bandwidth
        assert ours.gather_seconds(group, pieces) == pytest.approx(expected, rel=1e-9)


def test_memory_is_shared_out():
    one, four = prices("0").memory(1000, 64)["0"], prices("0&1&2&3").memory(1000, 64)
    assert sum(m.weights for m in four.values()) == pytest.approx(one.weights, rel=0.001)
    assert sum(m.cache for m in four.values()) == one.cache == 1000 * 8 * 2 * 4096 * 2


def test_the_strategies_of_four_devices():
    assert strategies(CLUSTER, "0123") == ["0", "0;1", "0&1", "0;1;2", "0&1;2", "0&1&2", "0;1;2;3", "0&1;2&3",
                                           "0&1&2&3"]
    uneven = replace(CLUSTER, devices={"0": GPU, "1": replace(GPU, bandwidth=1600e9)})
    assert strategies(uneven, "01") == ["1", "1*2;0", "1*2&0", "1;0", "1&0"]
    linked = replace(CLUSTER, links=dict.fromkeys([("0", "3"), ("3", "0"), ("1", "2"), ("2", "1")], Link(45e9, 9e-6)))
    assert "0&3;1&2" in strategies(linked, "0123")
    host = replace(CLUSTER, devices={"0": GPU, "cpu": replace(GPU, memory=1e12)})
    assert strategies(host, ["0", "cpu"], needed=28.8e9)[1] == "cpu*1;0"
    assert strategies(host, ["cpu"]) == ["cpu"]


def test_the_paper_s_ordering():
    """Hybrid decodes one query faster than by layer, and serves more queries than by tensor (arXiv 2401.08294)."""
    network, _ = random_network(find_shape("13b", layers=12), "F16", fuse=False)
    cluster = replace(CLUSTER, link=Link(6e9, 20e-6))
    one = {d: decode_rate(Prices(partition(network, d), cluster), 1, 512, 1)[0] for d in
           ("0;1;2;3", "0&1;2&3", "0&1&2&3")}
    assert one["0&1;2&3"] > 1.3 * one["0;1;2;3"]
    many = {d: decode_rate(Prices(partition(network, d), cluster), 64, 512, len(partition(network, d).groups))[0]
            for d in ("0&1;2&3", "0&1&2&3")}
    assert many["0&1;2&3"] > many["0&1&2&3"]


def test_stages_take_a_long_prompt_in_turns():
    alone, staged = prefill_seconds(prices("0"), 4096), prefill_seconds(prices("0;1;2;3"), 4096)
    assert staged < alone / 2


def test_ranking_tells_why():
    found = rank(NETWORK, CLUSTER, "0123", Goal(1, 512))
    assert found[0].reason.startswith("best: ")
    assert [c.score(Goal(1, 512)) for c in found] == sorted((c.score(Goal(1, 512)) for c in found), reverse=True)
    by_layer = next(c for c in found if c.devices == "0;1;2;3")
    assert "slower than" in by_layer.reason
    assert "devices wait for each other 7" in by_layer.reason


def test_what_does_not_fit_says_what_would():
    small = replace(CLUSTER, devices={str(i): replace(GPU, memory=3e9) for i in range(2)})
    found = rank(NETWORK, small, "01", Goal(8, 4096, "throughput"))
    assert not found[-1].fits
    reason = next(c for c in found if c.devices == "0;1").reason
    assert "does not fit: device 1 needs 4.2 GB of 3.0 GB (weights 1.9" in reason
    assert "tokens of all queries together would" in reason
    tiny = replace(CLUSTER, devices={str(i): replace(GPU, memory=3e8) for i in range(2)})
    reason = next(c for c in rank(NETWORK, tiny, "01", Goal(1, 64)) if c.devices == "0;1").reason
    assert "of 300 MB" in reason and "devices like that would hold it, or weights of fewer bits" in reason


def test_unequal_memory_is_filled():
    """Two equally fast devices, one with a third of the memory of the other."""
    small = replace(CLUSTER, devices={"0": replace(GPU, memory=3e9), "1": replace(GPU, memory=1e9)})
    best = rank(NETWORK, small, "01", Goal(1, 64))[0]
    assert best.fits and best.devices in ("0*3;1", "0*3&1")


def test_mistakes():
    with pytest.raises(DeviceError, match="four has no device '7'; it has 0, 1, 2, 3"):
        rank(NETWORK, CLUSTER, "07", Goal())
    with pytest.raises(RequestError, match="objective should be one of latency, throughput"):
        Goal(objective="speed")
    with pytest.raises(RequestError, match="batch should be at least 1"):
        Goal(batch=0)
    many = replace(CLUSTER, devices={str(i): GPU for i in range(9)})
    found = rank(NETWORK, many, [str(i) for i in range(9)], Goal(1, 64))
    assert "8 layers cannot be cut into 9 groups" in found[-1].reason


def test_a_drawing_shows_every_device_and_exchange():
    plan = partition(NETWORK, "0&1;2&3")
    text = "\n".join(draw(plan, Prices(plan, CLUSTER).memory(1000, 64)))
    assert "device 0     layers 0-3" in text
    assert "device 3     layers 4-7" in text
    assert "4096 numbers per token to device 2" in text
    assert exchanges(plan)["send"] == exchanges(plan)["receive"]


def test_what_was_measured_is_time_of_a_core_and_memory_is_shared():
    """Two devices on one host: compute time is that of one device alone, unless the shared memory bandwidth is the
    limit."""
    def seconds(factor, host_bandwidth):
        cluster = replace(CLUSTER, cores=2, host_bandwidth=host_bandwidth)
        found = replace(prices("0"), cluster=cluster, factors={step.op: factor for step in NETWORK.entries["main"]})
        simulator = Simulator(cluster, lambda job, now: None)
        script = found.scripts([Workload(1, 1, 0)])["0"]
        simulator.issue({"0": script, "1": script})
        return simulator.run()

    alone = prices("0").scripts([Workload(1, 1, 0)])["0"][0].seconds()
    assert seconds(1.0, 2 * GPU.bandwidth) == pytest.approx(alone)
    assert seconds(3.0, 1 * GPU.bandwidth) == pytest.approx(3 * alone)  # the core is what takes the time
    assert 1.9 * alone < seconds(1.0, 1 * GPU.bandwidth) < 2.01 * alone


def test_kinds_of_steps_and_crowded_exchanges():
    step = next(step for step in NETWORK.entries["main"] if step.label == "blk.3.ffn_down")
    assert kind_of(step) == "ffn_down"
    narrow = replace(CLUSTER, cores=2, crowded=1e-3, start=2e-3, start_each=1e-3)
    assert replace(prices("0&1"), cluster=narrow).reduce_seconds("01", 2, 0) < 1e-3
    assert replace(prices("0&1&2"), cluster=narrow).reduce_seconds("012", 3, 0) == pytest.approx(1e-3)
    assert replace(prices("0&1;2"), cluster=narrow).reduce_seconds("01", 2, 0) == pytest.approx(1e-3)
    assert narrow.gap(1) == 2e-3 and narrow.gap(3) == 4e-3
    slower = decode_rate(replace(prices("0"), cluster=narrow), 1, 64, 1)[0]
    assert 1 / slower - 1 / decode_rate(replace(prices("0"), cluster=replace(narrow, start=0)), 1, 64, 1)[0] == \
        pytest.approx(2e-3)
