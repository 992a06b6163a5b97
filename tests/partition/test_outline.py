"""Equal steps are priced once, different steps separately."""

from dataclasses import replace

import pytest

from numflow.lab.shapes import find_shape, random_network
from numflow.network.cost import Workload, weight_bytes
from numflow.ops import EXCHANGES
from numflow.partition.cut.cut import partition
from numflow.partition.price import price
from numflow.partition.price.events import Work
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link
from numflow.partition.price.outline import outline
from numflow.partition.price.planner import Goal, rank

CLUSTER = Cluster("four", {str(i): DeviceSpec("gpu", 16e9, 800e9, 80e12, 4e-6) for i in range(4)}, Link(11e9, 10e-6))
LOADS = [Workload(3, 1, 77), Workload(1, 64, 0, 0)]


def network(layers: int, kind: str = "F16"):
    return random_network(find_shape("7b", layers=layers), kind, fuse=False)[0]


def retyped(whole, name: str, kind: str):
    """A network with another type of one weight."""
    return replace(whole, weights={**whole.weights, name: replace(whole.weights[name], types=(kind,))})


@pytest.mark.parametrize("devices", ["0", "0;1", "0&1&2", "0&1;2&3"])
@pytest.mark.parametrize("factors", [{}, {"attn_q": 2.0, "ffn_up": 0.5}])
def test_scripts_take_as_long_as_all_their_steps(devices, factors):
    """Layers 0 and 2 equal, layer 1 smaller: the time between exchanges is the sum of the prices of its steps."""
    plan = partition(retyped(network(3), "blk.1.ffn_down.weight", "Q4_0"), devices)
    prices = price.Prices(plan, CLUSTER, factors=factors)
    for part in plan.devices:
        expected, open_ = [], False
        for step in part.network.entries["main"]:
            if step.op in EXCHANGES:
                expected.append(prices._exchange(part, step, LOADS))
                open_ = False
                continue
            seconds = max(prices.work(part, step, LOADS))
            expected = [*expected[:-1], expected[-1] + seconds] if open_ else [*expected, seconds]
            open_ = True
        found = [item.seconds() if isinstance(item, Work) else item for item in prices.scripts(LOADS)[part.name]]
        assert [pytest.approx(item, rel=1e-12) if isinstance(item, float) else item for item in expected] == found


def test_more_layers_are_not_more_pricings(monkeypatch):
    """All strategies of four devices: twice as many equal layers need the same number of pricings."""
    counted = []
    monkeypatch.setattr(price, "step_cost", lambda *args, real=price.step_cost: counted.append(1) or real(*args))
    counts = []
    for layers in (8, 16):
        counted.clear()
        rank(network(layers), CLUSTER, "0123", Goal(4, 1024))
        counts.append(len(counted))
    assert counts[0] == counts[1] > 0


def test_kinds_of_steps():
    plain = outline(network(6), "main", weight_bytes)
    assert [len(outline(network(n), "main", weight_bytes).kinds) for n in (2, 9)] == [len(plain.kinds)] * 2
    mixed = outline(retyped(network(6), "blk.4.attn_k.weight", "Q8_0"), "main", weight_bytes)
    assert len(mixed.kinds) == len(plain.kinds) + 1
    [place] = plain.order
    assert sum(count for _, count in plain.pieces[place]) == len(network(6).entries["main"])
    named = outline(network(6), "main", weight_bytes, price.kind_of)
    assert len(named.kinds) > len(plain.kinds), "attn_norm and ffn_norm cost the same, but have names of their own"
