"""Figures of GPUs: derived from the driver's timings, stored, and measured by kernels whose results are right."""

import json

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.weights.operand import UNIT, half_word
from numflow.errors import DeviceError
from numflow.lab import gpus, machine
from tests.cuda import timed_driver
from tests.cuda.timed_driver import TimedDriver

CPU_FIGURES = {"memory": 4e9, "bandwidth": 1e10, "operations": 1e11, "step": 1e-6, "host_bandwidth": 1e10,
               "latency": 1e-6, "crowded": 1e-5, "cores": 2.0, "start": 0.0, "start_each": 0.0}


@pytest.fixture
def driver(monkeypatch, tmp_path):
    made = TimedDriver(2)
    timed_driver.use(monkeypatch, made)
    monkeypatch.setattr(machine.places, "home", lambda: tmp_path)
    return made


def test_figures_are_medians_of_times(driver):
    found = gpus.measure(2)
    assert found["gpus"] == [{
        "memory": 7 << 30, "bandwidth": pytest.approx((1 << 30) / 0.25e-3 / slower),
        "operations": pytest.approx(2 * 8192 * 4096 * 2048 / 0.4e-3 / slower), "step": pytest.approx(2e-6 * slower),
    } for slower in (1, 2)]
    ways = {"cpu>0": "host", "0>cpu": "host", "cpu>1": "host", "1>cpu": "host", "0>1": "peer", "1>0": "peer"}
    assert found["links"] == {ends: {
        "bandwidth": pytest.approx(timed_driver.BANDWIDTH[way] * 1e3, rel=0.01),
        "latency": pytest.approx(timed_driver.LATENCY[way] * 1e-3, rel=0.03)} for ends, way in ways.items()}
    assert driver.memory == {} and driver.graphs == 0


def test_they_are_measured_once_for_the_cards_and_the_driver(driver, tmp_path):
    first = gpus.these_gpus()
    before = driver.works
    assert gpus.these_gpus() == first and driver.works == before > 0
    gpus.these_gpus(again=True)
    assert driver.works == 2 * before
    assert list(json.loads((tmp_path / "machine.json").read_text())) == ["fake GPU, fake GPU, driver 13.0, format 1"]
    driver.cuDriverGetVersion = lambda: (0, 13010)
    gpus.these_gpus()
    driver.devices = 1
    gpus.these_gpus()
    assert len(json.loads((tmp_path / "machine.json").read_text())) == 3 and driver.works > 3 * before


def test_the_cluster_of_them(driver, monkeypatch):
    monkeypatch.setattr(machine, "measure", lambda devices: CPU_FIGURES | {"memory": 4e9 / devices})
    cluster = gpus.these_gpus(["0", "cpu"])
    assert cluster.title == "this machine with 2 x fake GPU"
    assert list(cluster.devices) == ["0", "1", "cpu"] and cluster.devices["cpu"].memory == 4e9
    assert cluster.between("0", "1").bandwidth > 5 * cluster.between("cpu", "1").bandwidth
    assert list(gpus.these_gpus(["0"]).devices) == ["0", "1"]


def test_an_old_card_and_a_missing_driver(driver, monkeypatch):
    def none():
        raise DeviceError("device 'cuda' needs an NVIDIA driver, there is none")

    driver.CUdevice_attribute = type("Old", (), {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 7,
                                                 "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 5})
    with pytest.raises(DeviceError, match="GPU 0 has 7.5"):
        gpus.these_gpus()
    monkeypatch.setattr("numflow.cuda.compiler.compat.driver", none)
    with pytest.raises(DeviceError, match="needs an NVIDIA driver"):
        gpus.these_gpus()


@pytest.mark.parametrize(("what", "sizes"), [("reading", (5, 256)), ("product", (40, 64, 3))])
def test_timed_kernels_do_what_they_are_timed_for(what, sizes):
    """The products are right, so every argument is in its place and the whole matrix is read."""
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    device = Simulated()
    bench = gpus._Bench(device)
    work = getattr(bench, what)(*sizes)
    device.launch(work)
    (rows, columns), tokens = sizes[:2], (*sizes, 1)[2]
    sample = bench.sample.astype(np.float64)
    w = sample[:rows * columns].reshape(rows, columns)
    x = np.ones((1, columns))
    if what == "product":  # the operand is in tile order
        x = np.array([[sample[2 * half_word(t, column & ~1, columns // UNIT) + column % 2] for column in range(columns)]
                      for t in range(tokens)])
    y = device.download(work.values[0], 4 * tokens * rows).view(np.float32).reshape(tokens, rows)
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-3)


def test_the_small_kernel_copies():
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    device = Simulated()
    work = gpus._Bench(device).small()
    device.launch(work)
    assert (device.download(work.args[0], 512).view(np.float32) == 1).all()
