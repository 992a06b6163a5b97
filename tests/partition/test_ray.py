"""A plan on a Ray cluster of two nodes on this machine: bit-identical results, and workers killed under load."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

import numflow
from numflow.errors import DeviceError
from tests.engine.tiny import write_checkpoint
from tests.partition.rays import ray_cluster

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 2}):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def model(cluster, folder):
    with numflow.load(folder, devices="0;1&2", transport="ray", threads=1) as model:
        yield model


def test_the_same_bits_and_tokens(model, folder):
    ids = [1, 5, 9, 33, 2]
    with numflow.load(folder, devices="0;1&2", threads=1) as threads:
        np.testing.assert_array_equal(model.logits(ids), threads.logits(ids))
        assert model.generate(ids, max_tokens=12, ignore_eos=True).ids == \
            threads.generate(ids, max_tokens=12, ignore_eos=True).ids
        assert model.program.kv_bytes > 0 and model.program.weights_bytes == threads.program.weights_bytes
        assert model.program.block_bytes == threads.program.block_bytes
        with pytest.raises(DeviceError, match="a trace shows the devices of one machine"):
            model.trace([1])


def test_a_wrong_batch_hurts_no_other(model, folder):
    from numflow.errors import RequestError
    from numflow.ops import Batch

    each = np.arange(2, dtype=np.int32)
    wrong = Batch(np.array([1, 10**6], np.int32), each, np.array([0, 2], np.int32), np.zeros((1, 1), np.int32), each)
    with pytest.raises(RequestError, match="token id 1000000 is out of range"):
        model.program.run(wrong)
    assert model.logits([1, 2]).shape == (2, 50)
    assert model.program.restarts == 0


@pytest.mark.parametrize("group", [0, 1])
def test_a_worker_that_is_killed_under_load(model, folder, group):
    """kill -9 of an actor's process while requests run: the service goes on, and every request gets its normal result.
    """
    prompts = [[1, 5 + i, 9] for i in range(6)]
    with numflow.load(folder, devices="0;1&2", threads=1) as threads:
        expected = [threads.generate(ids, max_tokens=40, ignore_eos=True).ids for ids in prompts]
    before = model.program.restarts
    pid = ray.get(model.program._actors[group].call.remote("pid", ()))
    with numflow.Engine(model) as engine:
        handles = [engine.submit(ids, max_tokens=40, ignore_eos=True) for ids in prompts]
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        found = [handle.result(240).ids for handle in handles]
        killer.join()
        if model.program.restarts == before:  # the load was over before
            found = [engine.submit(ids, max_tokens=40, ignore_eos=True).result(240).ids for ids in prompts]
    assert found == expected
    assert model.program.restarts == before + 1


def test_a_worker_that_hangs(model, monkeypatch):
    expected, before = model.generate([1, 2], max_tokens=5, ignore_eos=True).ids, model.program.restarts
    pid = ray.get(model.program._actors[0].call.remote("pid", ()))
    monkeypatch.setattr(model.program, "timeout", 1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert model.generate([1, 2], max_tokens=5, ignore_eos=True).ids == expected
    finally:
        with contextlib.suppress(ProcessLookupError):  # the program has done it
            os.kill(pid, signal.SIGKILL)
    assert model.program.restarts == before + 1


def test_no_room(model, folder, monkeypatch):
    from numflow.partition.cluster import program as ray_program

    monkeypatch.setattr(ray_program, "PLACE_S", 2.0)
    with pytest.raises(DeviceError, match=r"no room for groups of 2 x \(1 CPU\) .* has 3 CPUs, 0 of them free"):
        numflow.load(folder, devices="0;1", transport="ray", threads=1)
    with pytest.raises(DeviceError, match=r"cannot have room for the 2 groups of devices 0;1: asked for "
                                          r"2 x \(64 CPUs\), each on one machine; its machines have "):
        numflow.load(folder, devices="0;1", transport="ray", threads=64)
