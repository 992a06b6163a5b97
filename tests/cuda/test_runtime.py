"""The runtime over a fake driver that runs kernels on the simulator."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

import numflow
from numflow.cuda import graphs
from numflow.cuda.compiler import compat
from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.device.slabs import ALIGN, SLAB, Slabs
from numflow.cuda.exchange.exchange import copy_rows
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.cuda.weights.pack import upload
from numflow.decoding.choice import Choice
from numflow.errors import DeviceError, DeviceFaultError
from numflow.learn.cases.build import run_case
from numflow.learn.cases.cases import CASES
from numflow.network.weights.source import RawMatrix
from numflow.ops import Batch
from tests.cuda.attention_shapes import attention_case
from tests.cuda.fake_driver import OK, Code, FakeDriver, fake_binary
from tests.cuda.matrices import experts_case
from tests.engine.tiny import write_checkpoint

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
BY_NAME = {case.name: case for case in CASES}


def gpu():
    return Gpu(FakeDriver(), 0, fake_binary)


@pytest.mark.parametrize("name", ["attention-grouped", "linear-48x100-17-rows", "rms_norm-heads"])
@pytest.mark.thin(2)
def test_the_same_bits_as_the_simulator(name):
    case = BY_NAME[name]
    if name.startswith("attention"):
        case = type(case)(**{**vars(case), "schedule": (((0, 3), (1, 1)), ((1, 1), (0, 1)))})
    for a, b in zip(run_case(case, Program, gpu=gpu()), run_case(case, Program, gpu=Simulated()), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_decoding_replays_a_graph(tmp_path):
    folder, device = write_checkpoint(tmp_path), gpu()
    with numflow.load(folder, backend="cuda", gpu=device) as model:
        replayed = model.generate([1, 7, 30, 4], max_tokens=7, ignore_eos=True).ids
        fake = device._cu
        assert fake.replays >= 4
        assert fake.graphs == 1
    assert fake.graphs == 0
    assert fake.memory == {}
    with numflow.load(folder, backend="cuda", gpu="simulator") as model:
        assert replayed == model.generate([1, 7, 30, 4], max_tokens=7, ignore_eos=True).ids


@pytest.mark.merge
def test_a_graph_serves_smaller_batches():
    """A bucket of four rows: three sequences, then four, then three others, by one CUDA graph."""
    case = BY_NAME["attention"]
    runs = (((0, 2), (1, 1), (2, 3), (3, 1)), *(tuple((s, 1) for s in some) for some in
            ((0, 1, 2), (0, 1, 2, 3), (3, 1, 2), (0, 2, 3))))
    case = type(case)(**{**vars(case), "schedule": runs})
    device = gpu()
    replayed = run_case(case, Program, gpu=device, rows=8)
    assert device._cu.replays == 3
    for a, b in zip(replayed, run_case(case, Program, gpu=Simulated()), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("choice", [Choice(), Choice(0.8, 0.5, (("top_p", 0.9),))], ids=["greedy", "drawn"])
@pytest.mark.thin(2)
def test_one_wait_for_each_token(choice, monkeypatch):
    """After a graph is recorded, the host waits once per token, for the sampled ids."""
    case, device = BY_NAME["attention"], gpu()
    fake, waits = device._cu, []
    monkeypatch.setattr(fake, "cuStreamSynchronize", lambda stream: waits.append(stream) or (OK,), raising=False)
    program = Program(case.network, case.weights, gpu=device)
    program.reserve(2)
    for position in range(5):
        before = len(waits), fake.replays
        program.sample(Batch(np.array([7]), np.array([position]), np.array([0, 1]), np.array([[0]]), np.array([0])),
                       [choice])
        if position > 1:
            assert (len(waits) - before[0], fake.replays - before[1]) == (1, 1)
    program.close()


class Told(FakeDriver):
    """A driver that records the calls on a stream in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name.startswith(("cuLaunch", "cuMemcpy", "cuEventRecord", "cuStreamWait", "cuStreamBegin")):
            self.calls.append(name)
        return found


@pytest.mark.parametrize("variable, overlaps", [("1", True), ("0", False)])
@pytest.mark.merge
def test_a_kernel_begins_early_only_behind_another_one(variable, overlaps, monkeypatch):
    monkeypatch.setenv("NUMFLOW_CUDA_DEPENDENT", variable)
    told, case = Told(), BY_NAME["attention-grouped"]
    device = Gpu(told, 0, fake_binary)
    for a, b in zip(run_case(case, Program, gpu=device), run_case(case, Program, gpu=Simulated()), strict=True):
        np.testing.assert_array_equal(a, b)
    before = [a for a, b in itertools.pairwise(told.calls) if b == "cuLaunchKernelEx"]
    # The fake driver's launch is made of the other one.
    assert set(before) <= {"cuLaunchKernel"} and bool(before) == overlaps
    assert "cuLaunchKernel" in told.calls


@pytest.mark.parametrize("most_rows", [1, 256], ids=["launches", "graphs"])
def test_no_kernel_of_a_step_begins_before_the_last_step_ends(most_rows, monkeypatch):
    """The last kernel of a step writes the positions of the next step, which kernels read before they wait."""
    monkeypatch.setattr(graphs, "MOST_ROWS", most_rows)
    told, case = Told(), BY_NAME["attention"]
    program = Program(case.network, case.weights, gpu=Gpu(told, 0, fake_binary))
    program.reserve(2)
    batch = Batch(np.array([7, 9]), np.array([0, 0]), np.array([0, 1, 2]), np.array([[0], [1]]), np.array([0, 1]),
                  limits=np.array([8, 8]))
    begins = []
    walk = program._walk
    monkeypatch.setattr(program, "_walk", lambda *args: (begins.append(len(told.calls)), walk(*args))[1])
    program.decode(batch, 3)
    firsts = [next((call for call in told.calls[begin:] if call.startswith("cuLaunch")), "replay") for begin in begins]
    assert len(begins) == 3 and "cuLaunchKernelEx" in told.calls
    assert firsts == (["cuLaunchKernel"] * 3 if most_rows == 1 else ["cuLaunchKernel", "cuLaunchKernel", "replay"])
    program.close()


def test_errors_of_the_driver():
    device = gpu()
    device._cu.cuMemAlloc = lambda nbytes: (Code(2), None)
    with pytest.raises(DeviceError, match="fake GPU has no memory left for 134217728 bytes"):
        device.alloc(128 << 20)
    with pytest.raises(DeviceError, match="there is no GPU 3: the driver reports 1"):
        Gpu(FakeDriver(), 3, fake_binary)


class SickDriver(FakeDriver):
    """A driver whose waits and frees fail from `bad` on, as after a kernel has accessed invalid memory."""

    def __init__(self):
        super().__init__()
        self.bad, self.released = False, []

    def cuStreamSynchronize(self, stream):
        return (Fault(700),) if self.bad else super().cuStreamSynchronize(stream)

    def cuMemFree(self, address):
        self.released.append("memory")
        return (Fault(700),) if self.bad else super().cuMemFree(address)

    def cuDevicePrimaryCtxRelease(self, device):
        self.released.append("context")
        return (OK,)


class Fault(Code):
    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_what_a_fault_leaves_is_given_back():
    driver = SickDriver()
    device = Gpu(driver, 0, fake_binary)
    device.alloc(1000)
    device.alloc(SLAB + 1)
    driver.bad = True
    with pytest.raises(DeviceFaultError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.close()
    assert driver.released == ["memory", "memory", "context"]


def test_a_fault_names_its_kernel_where_each_launch_is_waited_for():
    driver = SickDriver()
    device = Gpu(driver, 0, fake_binary, careful=True)
    assert not device.graphs
    memory = device.alloc(4096)
    device.upload(memory.at(), np.ones(1024, np.float32))
    driver.bad = True
    with pytest.raises(DeviceFaultError, match=r"kernel copy_rows, grid \(1, 1, 1\) of 128 threads: .*ILLEGAL_ADDRESS"):
        device.launch(Launch(copy_rows, (1, 1, 1), (memory.at(), 1, memory.at(), 1, memory.at(2048), 0, 1, 0)))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thin(2)
def test_parts_of_attention_have_room(seed):
    """For all heads, sequences and keys: no block writes a part beyond the scratch memory for parts."""
    rng = random.Random(seed)
    kv_heads, group, size = rng.choice((1, 2, 4, 8)), rng.choice((1, 4, 8, 71, 128)), rng.choice((64, 128))
    case = attention_case(kv_heads * group, kv_heads, size, size)
    options = {"activations": "f32"} if seed % 4 == 0 else {}
    program = Program(case.network, case.weights, gpu=Notebook(), kv_type="f16", **options)
    for sequences in (1, 17, 30, 32, 64, 300):
        for tokens in (sequences, sequences + 7, sequences + 500):
            sizes = Sizes((tokens, tokens, tokens, sequences), rng.choice((200, 2048, 100_000)))
            for launch in program.launches(sizes):
                if launch.kernel.name.startswith("attention") and launch.grid[2] > 1:
                    written = tokens * kv_heads * group * launch.grid[2] * (size + 2) * 4
                    assert written <= launch.values[2].memory.nbytes


def test_pieces_of_slabs_do_not_overlap():
    rng, reserved = random.Random(0), {}

    def reserve(nbytes):
        address = (max((a + n for a, n in reserved.items()), default=0) | 0xFFF) + 1
        reserved[address] = nbytes
        return address

    slabs, held = Slabs(reserve, reserved.pop), {}
    for _ in range(2000):
        if held and rng.random() < 0.48:
            slabs.give(rng.choice(list(held)))
            held = {a: n for a, n in held.items() if a in slabs._owner}
        else:
            size = rng.choice((1, 300, 5000, 1 << 20, 30 << 20, SLAB + 1))
            held[slabs.take(size)] = size
        pieces = sorted(held.items())
        assert all(a % ALIGN == 0 for a in held)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(pieces))
        assert all(any(s <= a and a + n <= s + m for s, m in reserved.items()) for a, n in held.items())
    for address in held:
        slabs.give(address)
    assert reserved == {}


def test_grids_that_no_gpu_takes():
    """On the simulator too. Matrices of many short rows, such as tables of large vocabularies, are processed in
    pieces."""
    work = Launch(copy_rows, (1, 65536, 1), (None,) * len(copy_rows.signature))
    for device in (Simulated(), gpu()):
        with pytest.raises(DeviceError, match=r"kernel copy_rows: a grid of \(1, 65536, 1\) blocks is larger"):
            device.launch(work)
    notebook = Notebook()
    upload(RawMatrix("head", "q2", np.zeros((262144, 97), np.uint8), (262144, 320)), notebook)
    for launch in notebook.launches:
        launch.check()
    assert len(notebook.launches) == 5  # 65535 rows at a time


def test_a_gpu_that_is_too_old():
    old = FakeDriver()
    old.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=7,
                                             CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=5)
    with pytest.raises(DeviceError, match=r"needs a GPU of compute capability 8.0 or newer, GPU 0 has 7.5"):
        Gpu(old, 0, fake_binary)


def test_names_of_gpus(monkeypatch):
    monkeypatch.setattr(compat, "driver", lambda: FakeDriver(devices=2))
    assert compat.gpu_names() == ["fake GPU", "fake GPU"]


def test_sizes_beyond_what_kernels_count():
    rows = np.lib.stride_tricks.as_strided(np.zeros(4, np.uint8), (1 << 21, 16384), (0, 0))
    with pytest.raises(DeviceError, match=r"matrix experts takes 32.0 GiB; kernels reach 16 GiB"):
        upload(RawMatrix("experts", "F16", rows, (1 << 21, 8192)), Notebook())


def test_rows_beyond_a_grid_of_two_dimensions():
    """Steps with one row for each route: 65,000 tokens with 8 experts each, some of them on another device."""
    case = experts_case("q4", 64, 512, experts=16, chosen=8, first=2, held=8, fill="blank")
    program = Program(case.network, case.weights, gpu=Notebook())
    names = set()
    for work in program.launches(Sizes((65_000, 65_000, 520_000, 1), 512)):
        work.check()
        names.add(work.kernel.name)
    assert "expert_absent" in names
