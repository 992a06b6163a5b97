"""Actors that request GPUs, on a Ray cluster whose nodes declare GPUs: the GPUs are simulated."""

import os
import signal

import numpy as np
import pytest

import numflow
from numflow.errors import DeviceError
from tests.engine.tiny import write_checkpoint
from tests.partition.rays import ray_cluster

ray = pytest.importorskip("ray")
pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IDS = [1, 5, 9]


@pytest.fixture(scope="module")
def cluster():
    """Nodes without GPUs, with one, and with two."""
    with ray_cluster({"num_cpus": 1, "num_gpus": 0}, {"num_cpus": 2, "num_gpus": 1}, {"num_cpus": 2, "num_gpus": 2}):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ray-gpus"))


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Simulated GPUs in all processes that tests start."""
    monkeypatch.setenv("NUMFLOW_CUDA", "simulator")


@pytest.fixture(scope="module")
def expected(folder):
    with numflow.load(folder, backend="cuda", devices="0;1&2", activations="f32", gpu="simulator") as model:
        return model.logits(IDS)


def gpus_of(node):
    """The number of GPUs that a node declares."""
    return next(info["Resources"].get("GPU", 0) for info in ray.nodes() if info["NodeID"] == node)


def bundles(program):
    return [bundle.get("GPU") for bundle in program._placed.bundle_specs]


def test_groups_go_where_their_gpus_are(cluster, folder, expected):
    """One GPU per device; inside an actor, the plan's numbers are those that its driver shows."""
    with numflow.load(folder, backend="cuda", devices="0;1&2", transport="ray", activations="f32") as model:
        assert bundles(model.program) == [1, 2]
        first, second = model.program.places()
        assert gpus_of(first.node) == 1 and gpus_of(second.node) == 2
        assert first.gpus == {"0": 0} and second.gpus == {"1": 0, "2": 1}
        assert len(first.visible.split(",")) == 1 and sorted(second.visible.split(",")) == ["0", "1"]
        np.testing.assert_array_equal(model.logits(IDS), expected)


def test_devices_share_a_gpu_where_there_are_fewer(cluster, folder):
    with numflow.load(folder, backend="cuda", devices="0&1;2&3", transport="ray", activations="f32") as model:
        assert bundles(model.program) == [1, 1], "the machines have one and two: two groups of two have no room"
        for place, names in zip(model.program.places(), ("01", "23"), strict=True):
            assert place.gpus == dict.fromkeys(names, 0) and len(place.visible.split(",")) == 1


def test_the_processor_beside_gpus(cluster, folder):
    """The CPU group requests threads, and is placed where no GPU is needed."""
    with numflow.load(folder, backend="cuda", devices="cpu;0&1", transport="ray", activations="f32",
                      threads=1) as model:
        assert [dict(bundle) for bundle in model.program._placed.bundle_specs] == [
            {"CPU": 1}, {"CPU": 2, "GPU": 2}]
        processor, graphics = model.program.places()
        assert processor.gpus == {} and graphics.gpus == {"0": 0, "1": 1} and gpus_of(graphics.node) == 2
        found = model.logits(IDS)
    with numflow.load(folder, backend="cuda", devices="cpu;0&1", activations="f32", threads=1) as model:
        np.testing.assert_array_equal(found, model.logits(IDS))


def test_an_actor_that_is_lost_comes_back_to_its_gpus(cluster, folder, expected):
    with numflow.load(folder, backend="cuda", devices="0;1&2", transport="ray", activations="f32") as model:
        before = model.program.places()
        os.kill(ray.get(model.program._actors[1].call.remote("pid", ())), signal.SIGKILL)
        np.testing.assert_array_equal(model.logits(IDS), expected)
        assert model.program.restarts == 1
        assert [place.gpus for place in model.program.places()] == [place.gpus for place in before]


def test_what_the_cluster_can_never_give(cluster, folder):
    with pytest.raises(DeviceError, match=r"cannot have room for the 2 groups of devices 0;1&2&3: asked for 1 x "
                                          r"\(1 CPU and 1 GPU\), 1 x \(3 CPUs and 3 GPUs\), each on one machine; "
                                          r"its machines have 1 x \(1 CPU and 0 GPUs\), 1 x \(2 CPUs and 1 GPU\), "
                                          r"1 x \(2 CPUs and 2 GPUs\); use fewer devices or threads"):
        numflow.load(folder, backend="cuda", devices="0;1&2&3", transport="ray", activations="f32")


def test_an_actor_that_cannot_begin(cluster, folder, monkeypatch):
    """The error message is the actor's, not Ray's."""
    monkeypatch.setenv("NUMFLOW_CUDA", "abacus")
    with pytest.raises(DeviceError, match="^no GPU device 'abacus'; known: gpu, simulator"):
        numflow.load(folder, backend="cuda", devices="0;1&2", transport="ray", activations="f32")


def test_gpus_that_are_taken(cluster, folder, monkeypatch):
    from numflow.partition.cluster import program as ray_program

    monkeypatch.setattr(ray_program, "PLACE_S", 2.0)
    with (numflow.load(folder, backend="cuda", devices="0;1&2", transport="ray", activations="f32"),
          pytest.raises(DeviceError, match=r"no room for groups of 1 x \(1 CPU and 1 GPU\) .* has 5 CPUs, .* and "
                                           "3 GPUs, 0 of them free")):
        numflow.load(folder, backend="cuda", devices="0", transport="ray", activations="f32")
