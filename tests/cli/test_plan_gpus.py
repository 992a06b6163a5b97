"""`numflow plan --device cuda`: for this machine's GPUs, or for a described cluster's."""

import json

import pytest

from numflow.errors import DeviceError
from numflow.lab import machine
from tests.cuda import timed_driver
from tests.cuda.timed_driver import TimedDriver
from tests.lab.test_gpus import CPU_FIGURES

PLAN = ("plan", "--shape", "135m", "--context", 64)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    made = TimedDriver(2)
    timed_driver.use(monkeypatch, made)
    monkeypatch.setattr(machine.places, "home", lambda: tmp_path)
    monkeypatch.setattr(machine, "measure", lambda devices: CPU_FIGURES)
    return made


def memory_of(result, devices):
    """Memory by device, of the candidate for these devices."""
    assert result.code == 0, result.err
    return next(c["memory"] for c in json.loads(result.out)["candidates"] if c["devices"] == devices)


def test_two_gpus_from_end_to_end(run, driver):
    result = run(*PLAN, "--device", "cuda")
    assert result.code == 0 and "on this machine with 2 x fake GPU, 1 x 64 tokens" in result.out
    assert "by tensor" in result.out and "by layer" in result.out and "cpu" not in result.out
    measured = driver.works
    asked = memory_of(run(*PLAN, "--device", "cuda", "--devices", "0&1", "--json"), "0&1")
    assert {name: memory["limit"] for name, memory in asked.items()} == {"0": 7 << 30, "1": 7 << 30}
    assert driver.works == measured
    run(*PLAN, "--device", "cuda", "--measure")
    assert driver.works == 2 * measured


def test_each_executor_holds_what_is_its_own(run, driver):
    """The same memory as on a described cluster: device numbers are CUDA devices, `cpu` is the processor."""
    words = ("--devices", "cpu;0", "--json")
    here = memory_of(run(*PLAN, "--device", "cuda", *words), "cpu;0")
    there = [memory_of(run(*PLAN, "--cluster", "rtx4090-host", *device, *words), "cpu;0")
             for device in ((), ("--device", "cuda"), ("--device", "cpu"))]
    taken = [{name: (m["weights"], m["kv"]) for name, m in memory.items()} for memory in (here, *there)]
    assert taken[0] == taken[1] == taken[2] != taken[3]
    assert here["cpu"]["limit"] == 4e9


@pytest.mark.parametrize(("words", "said"), [
    (("--device", "reference"), "--device should be cpu or cuda, is 'reference'"),
    (("--device", "cuda", "--devices", "0;5"), "this machine with 2 x fake GPU has no device '5'; it has 0, 1"),
    (("--device", "cuda", "--memory", "1MB"), "no strategy fits")])
def test_mistakes_are_one_line(run, driver, words, said):
    result = run(*PLAN, *words)
    assert result.code == 1 and said in result.err and len(result.err.strip().splitlines()) == 1


def test_without_a_driver(run, monkeypatch):
    def none():
        raise DeviceError("device 'cuda' needs an NVIDIA driver, there is none; --device cpu runs models without")

    monkeypatch.setattr("numflow.cuda.compiler.compat.driver", none)
    result = run(*PLAN, "--device", "cuda")
    assert result.code == 1 and "needs an NVIDIA driver" in result.err and len(result.err.strip().splitlines()) == 1
