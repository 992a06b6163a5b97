"""All-reduce and all-gather by NCCL, with a fake library and fake GPUs."""

import threading
from collections import Counter

import numpy as np
import pytest

from numflow.cuda.compiler import compat
from numflow.cuda.device.device import Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.exchange.nccl import Clique, clique
from numflow.errors import DeviceError, RequestError
from numflow.lab.shapes import Shape, random_network
from numflow.ops import param
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.fake_nccl import FakeNccl, PatientDriver
from tests.partition.plans import TOLERANCE, error, placed, run

IDS = {"ids": [3, 9, 27]}


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
    return random_network(Shape(1, 32, 2, 2, 32, 40, 64), "F16", fuse=False)


@pytest.fixture(scope="module")
def alone(model):
    """Logits of a single simulated GPU."""
    program = placed(*model, "cuda", "0", activations="f32", gpu="simulator")
    try:
        return run(program, output="logits", **IDS)
    finally:
        program.close()


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs and NCCL."""
    driver = PatientDriver(2, seed=5)
    library = FakeNccl(driver)
    _use(monkeypatch, driver)
    monkeypatch.setattr(compat, "nccl", lambda: library)
    return driver, library


def _use(monkeypatch, driver):
    monkeypatch.setattr("numflow.cuda.device.gpu.open_gpu",
                        lambda index, careful=None: Gpu(driver, index % driver.devices, fake_binary))


def _placed(model, devices="0&1", **options):
    return placed(*model, "cuda", devices, activations="f32", gpu="gpu", **options)


@pytest.mark.slow  # .ci/cuda runs them
@pytest.mark.parametrize("choice", ["auto", "nccl"])
def test_a_group_of_two_cards(machine, model, alone, choice):
    """Every exchange is one call of each rank, in its device's stream, without copied buffers."""
    driver, library = machine
    program = _placed(model, collectives=choice)
    assert error(run(program, output="logits", **IDS), alone) < TOLERANCE
    exchanges = [step for step in program.parts[0].network.entries["main"] if step.op in ("all_reduce", "all_gather")]
    assert len(exchanges) > 3 and driver.peer_copies == 0 and library.cards == [[0, 1]]
    for rank in (0, 1):
        mine = [call for call in library.calls if call[1] == rank]
        assert [call[0] for call in mine] == [step.op for step in exchanges]
        assert {call[3] for call in mine} == {program._world.of(rank).devices[rank].lend()}
        for (_, _, count, _), step in zip(mine, exchanges, strict=True):
            widest = step.outputs[0].width if step.op == "all_reduce" else max(b - a for a, b in param(step, "spans"))
            assert count == 3 * widest
    program.close()
    assert Counter(comm.state for comm in library.made) == {"destroyed": 2}
    assert driver.memory == {}


@pytest.mark.slow
def test_decoding_keeps_calls_out_of_graphs(machine, model):
    """The fake library refuses a stream that is being captured."""
    driver, library = machine
    program = _placed(model)
    found = [run(program, output="logits", ids=[3]) for _ in range(4)]
    assert driver.replays and len(library.calls) % 8 == 0
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    program.close()


@pytest.mark.slow
def test_uneven_shares_and_pieces(machine, model, alone):
    """Devices contribute different widths: buffers are as wide as the widest."""
    _, library = machine
    program = _placed(model, "0*3&1", collectives="nccl")
    assert error(run(program, output="logits", **IDS), alone) < TOLERANCE
    assert any(call[0] == "all_gather" for call in library.calls)
    program.close()


@pytest.mark.slow
def test_a_device_that_fails_leaves_nobody_waiting(machine, model, alone):
    """The other GPU waits inside the library: its call is aborted, the run ends with the error, and the next run is
    correct."""
    driver, library = machine
    program = _placed(model, collectives="nccl")
    device = program._world.of(1).devices[1]
    launch, count = device.launch, iter(range(10**6))

    def fail(work):
        if next(count) == 12:
            raise DeviceError("the card has fallen off the bus")
        launch(work)

    device.launch = fail
    with pytest.raises(DeviceError, match="the card has fallen off the bus"):
        run(program, output="logits", **IDS)
    assert [comm.state for comm in library.made] == ["aborted", "aborted"]
    device.launch = launch
    assert error(run(program, output="logits", **IDS), alone) < TOLERANCE
    assert [comm.state for comm in library.made[2:]] == ["alive", "alive"]
    program.close()
    assert driver.memory == {}


@pytest.mark.slow
def test_a_wrong_request_costs_no_communicator(machine, model, alone):
    _, library = machine
    program = _placed(model, collectives="nccl")
    run(program, output="logits", **IDS)
    with pytest.raises(RequestError):
        run(program, output="logits", ids=[10**6])
    assert error(run(program, output="logits", **IDS), alone) < TOLERANCE
    assert len(library.made) == 2 and {comm.state for comm in library.made} == {"alive"}
    program.close()


@pytest.mark.slow
def test_auto_falls_back_to_copies(machine, model, alone, caplog):
    driver, library = machine
    library.refuse = True
    program = _placed(model)
    assert error(run(program, output="logits", **IDS), alone) < TOLERANCE
    assert driver.peer_copies and not library.calls
    assert [record.message for record in caplog.records] == [
        "NCCL cannot join GPUs 0, 1: UnhandledCudaError (1): unhandled cuda error; copies are used instead"]
    program.close()
    program = _placed(model, collectives="nccl")
    with pytest.raises(DeviceError, match="NCCL cannot join GPUs 0, 1: UnhandledCudaError"):
        run(program, output="logits", **IDS)
    program.close()


def _gpus(count, driver=None):
    driver = driver or PatientDriver(count)
    return [Gpu(driver, index, fake_binary) for index in range(count)]


def test_who_meets_by_nccl(monkeypatch):
    library = FakeNccl(PatientDriver())
    monkeypatch.setattr(compat, "nccl", lambda: library)
    device = _gpus(2)[0]
    assert clique("auto", device, (0, 1), {0: 0, 1: 1}).cards == [0, 1]
    assert clique("nccl", device, (1, 0), {0: 4, 1: 3}).cards == [1, 0], "numbers beyond the last card begin again"
    assert clique("copies", device, (0, 1), {0: 0, 1: 1}) is None
    assert clique("nccl", device, (0,), {0: 0}) is None
    for numbers in ({0: 0, 1: 2}, {0: 0, 1: 1, 2: 2, 3: 3}):  # two on a card, in this group or another
        assert clique("auto", device, (0, 1), numbers) is None
        with pytest.raises(DeviceError, match="collectives 'nccl': NCCL needs a GPU for each .* on GPU 0 of 2"):
            clique("nccl", device, (0, 1), numbers)
    assert clique("auto", Simulated(), (0, 1), {0: 0, 1: 1}) is None
    with pytest.raises(DeviceError, match="collectives 'nccl': simulated GPU 0 is not a GPU; 'copies' need only"):
        clique("nccl", Simulated(), (0, 1), {0: 0, 1: 1})


def test_without_the_library(monkeypatch):
    def missing():
        raise DeviceError("NCCL needs the package nccl4py (No module): pip install 'numflow-llm[nccl]'")

    monkeypatch.setattr(compat, "nccl", missing)
    device = _gpus(2, FakeDriver(2))[0]
    assert clique("auto", device, (0, 1), {0: 0, 1: 1}) is None
    with pytest.raises(DeviceError, match=r"collectives 'nccl': NCCL needs the package nccl4py .*numflow-llm\[nccl\]"):
        clique("nccl", device, (0, 1), {0: 0, 1: 1})


def test_an_option_that_is_none(model):
    with pytest.raises(RequestError, match="collectives should be one of auto, copies, nccl, is 'rings'"):
        placed(*model, "cuda", "0&1", gpu="simulator", collectives="rings")


def test_abort_of_what_all_have_called_keeps_the_communicators():
    driver = PatientDriver()
    library, gpus = FakeNccl(driver), _gpus(2, driver)
    made, memory = Clique(library, [0, 1]), [gpu.alloc(64).at() for gpu in gpus]
    assert made.ready()
    for rank, gpu in enumerate(gpus):
        gpu.upload(memory[rank], np.full(4, 1 + rank, np.float32))
        made.all_reduce(rank, gpu, memory[rank], memory[rank], 4)
    made.abort()
    with pytest.raises(DeviceError, match="GPUs 0, 1 were about to exchange data when the run was broken off"):
        made.all_reduce(0, gpus[0], memory[0], memory[0], 4)
    made.reset()
    for rank, gpu in enumerate(gpus):
        np.testing.assert_array_equal(gpu.download(memory[rank], 16).view(np.float32), 3)
    made.all_reduce(0, gpus[0], memory[0], memory[0], 4)  # a call that the other rank does not make
    other = threading.Timer(0.1, made.abort)
    other.start()
    assert np.isnan(gpus[0].download(memory[0], 16).view(np.float32)).all(), "it waited for the abort, no longer"
    other.join()
    assert {comm.state for comm in library.made} == {"aborted"}
    with pytest.raises(DeviceError, match="broken off"):
        made.ready()
    made.reset()
    assert made.ready() and len(library.made) == 4
    made.close()
    made.close()
    assert {comm.state for comm in library.made[2:]} == {"destroyed"}
    with pytest.raises(DeviceError, match="communicators of GPUs 0, 1 are closed"):
        made.all_reduce(0, gpus[0], memory[0], memory[0], 4)


def test_a_call_that_the_library_refuses_ends_the_clique(monkeypatch):
    driver = PatientDriver()
    library, gpus = FakeNccl(driver), _gpus(2, driver)
    made, memory = Clique(library, [0, 1]), [gpu.alloc(64).at() for gpu in gpus]
    made.ready()

    def refused(*args):
        raise library.NCCLError("InternalError (3)")

    made.all_reduce(0, gpus[0], memory[0], memory[0], 4)
    monkeypatch.setattr(library, "all_reduce", refused)
    with pytest.raises(DeviceError, match=r"NCCL between GPUs 0, 1: InternalError \(3\)"):
        made.all_reduce(1, gpus[1], memory[1], memory[1], 4)
    made.abort()  # both ranks have made the same number of calls, but one call has failed
    assert {comm.state for comm in library.made} == {"aborted"}


def test_broken_off_while_communicators_are_made(monkeypatch):
    driver = PatientDriver()
    library = FakeNccl(driver)
    made, make = Clique(library, [0, 1]), library.comm_init_all

    def slow(count, cards):
        made.abort()
        return make(count, cards)

    monkeypatch.setattr(library, "comm_init_all", slow)
    with pytest.raises(DeviceError, match="broken off"):
        made.ready()
    assert {comm.state for comm in library.made} == {"aborted"}


@pytest.mark.slow
def test_the_suite_measures_both_ways(machine, model, monkeypatch, tmp_path):
    """With two GPUs the suite measures NCCL and copies; with one it reports that it cannot."""
    from experiments.gpu_suite import collectives
    from experiments.gpu_suite.setting import Setting

    driver, library = machine
    monkeypatch.setattr(collectives, "TOY", {"toy": Shape(1, 32, 2, 2, 32, 40, 64)})
    setting = Setting(False, True, tmp_path, "collectives")
    monkeypatch.setattr(Setting, "device", lambda self, careful=False: Gpu(driver, 0, fake_binary))
    collectives.collectives(setting)
    copies, nccl = setting.rows
    assert (copies["collectives"], nccl["collectives"]) == ("copies", "nccl")
    assert copies["off"] == 0 and nccl["off"] < TOLERANCE and copies["tokens_per_s"] > 0 and library.calls
    driver.devices = 1
    setting.rows.clear()
    collectives.collectives(setting)
    assert len(setting.rows) == 1 and setting.rows[0]["what"].endswith("two cards, and the driver reports one")
