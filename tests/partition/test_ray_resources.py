"""Resources that actors request of a Ray cluster, and the GPUs of an actor's devices. Without Ray."""

import pytest

from numflow.errors import DeviceError
from numflow.lab.shapes import Shape, random_network
from numflow.partition.cluster.resources import Need, bundles, needs_of, visible_gpus
from numflow.partition.cut.cut import partition
from numflow.partition.cut.devices import executors_of, parse_devices


def nodes(*gpus, cpus=8):
    return [{"CPU": float(cpus), "GPU": float(count)} for count in gpus]


def test_a_plan_needs_gpus_and_threads():
    built, _ = random_network(Shape(2, 32, 2, 2, 32, 40, 64), "F16", fuse=False)
    placement = parse_devices("cpu;0&1")
    plan = partition(built, placement, executors_of(placement, "cuda"))
    assert needs_of(plan, 3) == [Need(3, 0), Need(2, 2)]
    assert needs_of(partition(built, "0;1", "cpu"), None) == [Need(1, 0), Need(1, 0)]


@pytest.mark.parametrize(("devices", "machines", "asked"), [
    ((2, 2), (4,), [2, 2]),          # a GPU for each device
    ((2, 2), (2, 2), [2, 2]),        # a group on each machine
    ((2, 2), (1, 1), [1, 1]),        # two devices to a GPU, since no machine has two
    ((2, 2), (2,), [1, 1]),
    ((2, 2), (1,), [0.5, 0.5]),      # all on one card
    ((3, 1), (2,), [1, 0.3333]),     # whole GPUs above one
    ((1, 1, 1), (1,), [0.3333] * 3),
    ((4,), (3,), [2]),
    ((1, 0), (0, 1), [1, 0]),        # a group without GPUs goes where there are none
])
def test_as_few_devices_to_a_gpu_as_there_is_room_for(devices, machines, asked):
    found = bundles([Need(max(count, 1), count) for count in devices], nodes(*machines), "a plan")
    assert [bundle.get("GPU", 0) for bundle in found] == asked
    assert all(bundle["CPU"] for bundle in found)


def test_what_a_cluster_can_never_give():
    with pytest.raises(DeviceError, match=r"cannot have room for the plan: asked for 2 x \(1 CPU and 1 GPU\), each on "
                                          r"one machine; its machines have 2 x \(8 CPUs and 0 GPUs\); use fewer"):
        bundles([Need(1, 1)] * 2, nodes(0, 0), "the plan")
    with pytest.raises(DeviceError, match=r"asked for 1 x \(9 CPUs\), 1 x \(1 CPU and 1 GPU\), each"):
        bundles([Need(9), Need(1, 1)], nodes(1, 1), "the plan")
    with pytest.raises(DeviceError, match="its machines have none"):
        bundles([Need(1)], [], "the plan")
    with pytest.raises(DeviceError, match="cannot have room"):  # the machine with a GPU has no CPUs for both
        bundles([Need(5, 1), Need(5, 1)], nodes(1, 0, cpus=5), "the plan")


def test_devices_of_an_actor_are_gpus_that_ray_gave_it():
    assert visible_gpus(["2", "3"], ["6", "7"]) == {"2": 0, "3": 1}, "the driver shows these two alone"
    assert visible_gpus(["2", "3"], ["6", "7"], shown=False) == {"2": 6, "3": 7}, "the driver shows all"
    assert visible_gpus(["0", "2", "5"], [4]) == {"0": 0, "2": 0, "5": 0}
    assert visible_gpus(["0", "1", "2"], [1, 3]) == {"0": 0, "1": 1, "2": 0}
    assert visible_gpus(["0"], []) == {}
