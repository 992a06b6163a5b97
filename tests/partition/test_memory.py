"""What the planner says that devices will take of memory, against what their programs take."""

import pytest

from numflow.cpu import program as executor
from numflow.cpu.estimate import cache_bytes, weight_bytes
from numflow.lab.shapes import find_shape, random_network
from numflow.network import WeightSource
from numflow.partition.cut import partition
from numflow.partition.hardware import Cluster, Device, Link
from numflow.partition.price import Prices
from numflow.partition.program import PlanProgram

BLOCKS = 3
SIZES = {"layers": 2, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocabulary": 300}


@pytest.mark.parametrize("devices", ["0", "0;1", "0&1"])
@pytest.mark.parametrize(("weights", "kv"), [("F16", "f32"), ("Q4_0", "f16"), ("Q8_0", "q8"), ("q3h", "q3h")])
def test_predictions_are_within_a_hundredth(devices, weights, kv):
    network, checkpoint = random_network(find_shape("1b", **SIZES), weights, fuse=False)
    plan = partition(network, devices)
    device = Device("virtual", 1e9, 1e9, 1e9)
    cluster = Cluster("here", {part.name: device for part in plan.devices}, Link(1e9, 0))
    prices = Prices(plan, cluster, weigh=weight_bytes, hold=lambda cache: cache_bytes(cache, kv, kv))
    program = PlanProgram(plan, executor, lambda own: WeightSource(own, checkpoint), threads=1, kv_k=kv, kv_v=kv)
    try:
        program.reserve(BLOCKS)
        predicted = prices.memory(BLOCKS * program.block_size, 1).values()
        assert [m.weights for m in predicted] == pytest.approx(program.device_weights_bytes, rel=0.01)
        assert [m.cache for m in predicted] == pytest.approx(program.device_kv_bytes, rel=0.01)
    finally:
        program.close()
