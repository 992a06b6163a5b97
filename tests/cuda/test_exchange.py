"""Several GPUs: a tiny model cut by layer and by tensor, on simulated GPUs and on streams of a lazy driver."""

from collections import deque

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.exchange.exchange import Parcel, World
from numflow.cuda.lang.kernel import REGISTRY, kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.errors import DeviceError
from numflow.lab.shapes import Shape, random_network
from numflow.partition.run import micro
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.kernels import compiler_is_there
from tests.cuda.lazy_driver import LazyDriver
from tests.cuda.on_ptx.driver import PtxDriver
from tests.partition.plans import TOLERANCE, error, model_of, placed, run

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them
needs_compiler = pytest.mark.skipif(not compiler_is_there(), reason="no numba-cuda")


@pytest.fixture(scope="module")
def model():
    """The smallest model that can be cut in all ways, because simulated GPUs are slow."""
    return (*random_network(Shape(2, 32, 2, 2, 32, 40, 64), "F16", fuse=False), {"ids": [3, 9, 27]})


@pytest.fixture(scope="module")
def alone(model):
    """Logits of a single simulated GPU."""
    return _logits(model, "0", "simulator")


def _logits(model, devices, gpu, **options):
    built, checkpoint, given = model
    program = placed(built, checkpoint, "cuda", devices, activations="f32", gpu=gpu, collectives="copies", **options)
    try:
        return run(program, output="logits", **given)
    finally:
        program.close()


def _use(monkeypatch, driver) -> dict[int, int]:
    """Replace the machine's driver by this one. Returns the number of devices on each GPU."""
    opened = {}

    def open_gpu(index, careful=None):
        opened[index % driver.devices] = opened.get(index % driver.devices, 0) + 1
        return Gpu(driver, index % driver.devices, fake_binary)

    monkeypatch.setattr("numflow.cuda.device.gpu.driver", lambda: driver)
    monkeypatch.setattr("numflow.cuda.device.gpu.open_gpu", open_gpu)
    return opened


@pytest.mark.parametrize("name", ["mixtral", "m2m100"])
def test_experts_and_encoders(name):
    built, checkpoint, given = model_of(name)
    model = built, checkpoint, {what: ids[:2] if ids else ids for what, ids in given.items()}
    one = _logits(model, "0", "simulator")
    np.testing.assert_array_equal(_logits(model, "0;1", "simulator"), one)
    assert error(_logits(model, "0&1", "simulator"), one) < TOLERANCE


def test_by_layer_the_same_bits_as_one_device(model, alone):
    np.testing.assert_array_equal(_logits(model, "0;1", "simulator"), alone)


def test_by_tensor_the_same_but_for_rounding(model, alone):
    assert error(_logits(model, "0&1", "simulator"), alone) < TOLERANCE


@pytest.mark.parametrize(("devices", "gpus", "seed"), [("0;1", 1, 1), ("0&1", 1, 2), ("0&1", 2, 3), ("0;1&2", 2, 4)])
def test_queues_that_get_on_in_any_order(monkeypatch, model, devices, gpus, seed):
    """Events order the streams: results equal those of the simulator in every order of execution."""
    driver = LazyDriver(gpus, seed)
    opened = _use(monkeypatch, driver)
    expected = _logits(model, devices, "simulator")
    runs = 0
    while runs < 4 and driver.swaps <= 10:  # the number of swaps depends on the timing of the host threads
        np.testing.assert_array_equal(_logits(model, devices, "gpu"), expected)
        runs += 1
    assert driver.swaps > 10
    assert driver.memory == {}
    assert len(opened) == gpus and sum(opened.values()) == runs * (devices.count(";") + devices.count("&") + 1)
    assert bool(driver.peer_copies) == (gpus > 1)


@needs_compiler
@pytest.mark.parametrize(("devices", "gpus", "seed"), [("0;1", 2, 1), ("0&1", 2, 2), ("0;1&2", 3, 3)])
def test_several_machines_that_run_ptx(monkeypatch, model, devices, gpus, seed):
    """Kernels from their PTX, with streams and warps in random order: no findings, the same results in every order, and
    equal to those of the simulator up to rounding."""
    found, expected = [], _logits(model, devices, "simulator")
    for order in range(3):
        driver = PtxDriver(gpus, 10 * seed + order)
        _use(monkeypatch, driver)
        found.append(_logits(model, devices, "gpu"))
        assert driver.swaps > 5 and driver.peer_copies and not driver.checks.notes, driver.checks.notes
    assert error(found[0], expected) < TOLERANCE
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@needs_compiler
def test_an_exchange_without_events_is_noticed(monkeypatch, model):
    """The planted bug for the test above."""
    right, noticed = _logits(model, "0&1", "simulator"), 0
    for seed in range(3):
        driver = PtxDriver(2, seed, ordered=False)
        _use(monkeypatch, driver)
        wrong = not error(_logits(model, "0&1", "gpu"), right) < TOLERANCE
        noticed += wrong or bool(driver.checks.notes)
    assert noticed == 3


def test_decoding_is_graphs_between_exchanges(monkeypatch, model):
    built, checkpoint, given = model
    driver = FakeDriver()
    _use(monkeypatch, driver)
    program = placed(built, checkpoint, "cuda", "0&1", activations="f32", gpu="gpu")
    for _ in range(3):  # eager, recorded, replayed
        last = run(program, output="logits", ids=given["ids"][:1])
    exchanges = sum(step.op in ("all_reduce", "all_gather") for step in program.parts[0].network.entries["main"])
    assert driver.replays >= 2 * exchanges
    np.testing.assert_array_equal(last, run(program, output="logits", ids=given["ids"][:1]))
    program.close()
    assert driver.memory == {}


def test_long_batches_go_through_in_pieces(monkeypatch, model, alone):
    monkeypatch.setattr(micro, "ROWS", 1)
    found = _logits(model, "0;1", "simulator")
    assert error(found, alone) < TOLERANCE


def test_a_parcel_is_an_array_for_whoever_takes_it():
    """A parcel converts to an array and then returns to its stock."""
    device = Simulated()
    stock = deque()
    parcel = Parcel(device, device.alloc_host(4096), stock, shape=(2, 3))
    device.host_array(parcel.pinned)[:24].view(np.float32)[:] = range(6)
    target = np.empty((2, 3), np.float32)
    target[:] = parcel
    np.testing.assert_array_equal(target, [[0, 1, 2], [3, 4, 5]])
    assert list(stock) == [parcel]


def test_devices_that_make_the_same_kernel_at_the_same_time():
    """functools.cache lets two threads in at once; the second one gets the kernel of the first."""
    def made(factor):
        @kernel("scale_in_two_threads", 32)
        def _scale(y: f32.ptr, n: u32):
            y[n] = y[n] * factor
        return _scale

    assert made(2) is made(2)
    with pytest.raises(AssertionError, match="two kernels are called scale_in_two_threads"):
        made(3)
    del REGISTRY["scale_in_two_threads"]


def test_mistakes(model):
    built, checkpoint, _ = model
    with pytest.raises(DeviceError, match="device 'cpu' is no GPU: GPUs are numbers"):
        placed(built, checkpoint, "cuda", "cpu;0", gpu="simulator")
    with pytest.raises(DeviceError, match="use transport 'threads'"):
        placed(built, checkpoint, "cuda", "0;1", transport="processes")
    world = World({0: None, 1: None}, names={0: "3", 1: "2"})
    assert world.numbers == {0: 3, 1: 2}


def test_a_part_of_a_table_in_the_host_s_memory(model):
    """Each device copies the rows of its own tokens, and has -0.0 for the others, so that the sum has the same bits."""
    np.testing.assert_array_equal(_logits(model, "0&1", "simulator", host_embeddings=True),
                                  _logits(model, "0&1", "simulator"))
