"""Plans across executors: the CPU with (simulated) GPUs, by device string and by --cpu-layers."""

import json

import numpy as np
import pytest

import numflow
from numflow.decoding.choice import Choice
from numflow.errors import DeviceError, RequestError
from numflow.executor.contract import SAMPLE
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.ops import Batch
from numflow.partition.cut.cpu_layers import with_cpu_layers
from numflow.partition.cut.cut import partition
from numflow.partition.cut.devices import executors_of, parse_devices
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link
from numflow.partition.price.price import Holding, Prices
from numflow.partition.run import micro
from numflow.partition.run.program import PlanProgram
from tests.engine.tiny import write_checkpoint
from tests.partition.plans import error, executor, model_of, one_device
from tests.partition.test_cli import _numflow
from tests.specs.case import run

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
NEAR = 1e-4  # two executors; tiny models magnify rounding
FAMILIES = {"qwen2": "cpu;0", "mixtral": "cpu;0", "m2m100": "0;cpu"}  # plain, experts, encoder and decoder


def short_model(name: str):
    """A family's tiny model, and inputs of two tokens, since simulated GPUs are slow."""
    built, checkpoint, given = model_of(name)
    return built, checkpoint, {what: ids[:2] if ids else ids for what, ids in given.items()}


def mixed(built, checkpoint, devices, layers=None, **more) -> PlanProgram:
    """A plan program: "cpu" runs on the CPU executor, numbers are simulated GPUs."""
    placement = parse_devices(devices) if isinstance(devices, str) else devices
    plan = partition(built, placement, executors_of(placement, "cuda"), layers=layers)
    modules = {name: executor(name) for name in ("cpu", "cuda")}
    return PlanProgram(plan, modules, lambda part: WeightSource(part, checkpoint), threads=1, activations="f32",
                       gpu="simulator", **more)


def logits(built, checkpoint, devices, given, **more) -> np.ndarray:
    program = mixed(built, checkpoint, devices, **more)
    try:
        return run(program, output="logits", **given)
    finally:
        program.close()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.thin(2)
def test_the_processor_beside_a_gpu(name):
    built, checkpoint, given = short_model(name)
    expected = one_device(built, checkpoint, "cpu", **given)
    assert error(logits(built, checkpoint, FAMILIES[name], given), expected) < NEAR


def test_groups_of_gpus_beside_the_processor(monkeypatch):
    """With long batches pipelined through the groups, and tokens sampled on the device with the logits."""
    built, checkpoint = random_network(Shape(2, 32, 2, 2, 32, 40, 64), "F16", fuse=False)
    ids = [3, 9, 27]
    expected = one_device(built, checkpoint, "cpu", ids=ids)
    monkeypatch.setattr(micro, "ROWS", 1)
    program = mixed(built, checkpoint, "cpu;0&1")
    assert error(run(program, output="logits", ids=ids), expected) < NEAR
    each = np.arange(3)
    batch = Batch(np.array(ids), each, np.array([0, 3]), np.array([[0]]), each[1:])
    np.testing.assert_array_equal(program.sample(batch, [Choice(), Choice()]), expected.argmax(1)[1:])
    with pytest.raises(RequestError, match="token id 99"):  # one request that is wrong hurts no other
        program.run(Batch(np.array([99]), each[:1], np.array([0, 1]), np.array([[0]]), each[:1]))
    assert error(run(program, output="logits", ids=ids), expected) < NEAR
    assert program.threads == 1
    assert len(program.device_weights_bytes) == 3 and min(program.device_weights_bytes) > 0
    program.close()


def test_a_plan_says_who_runs_what():
    built, _, _ = short_model("qwen2")
    placement = parse_devices("cpu;1&0")
    plan = partition(built, placement, executors_of(placement, "cuda"))
    assert [(part.name, part.executor) for part in plan.devices] == [("cpu", "cpu"), ("1", "cuda"), ("0", "cuda")]
    assert set(executors_of(placement, "cpu").values()) == {"cpu"}
    with pytest.raises(DeviceError, match="'?cpu&0: a group runs on one executor, not on cpu and cuda: put ';'"):
        partition(built, "cpu&0", executors_of(parse_devices("cpu&0"), "cuda"))


@pytest.mark.parametrize(("devices", "count", "text", "counts"), [
    (None, 1, "cpu;0", (1, 3)), (None, -1, "0;cpu", (3, 1)), ("0;1", 2, "cpu;0;1", (2, 1, 1)),
    ("0&1", -3, "0&1;cpu", (1, 3)), ("0*2;1", 1, "cpu;0*2;1", (1, 2, 1))])
def test_cpu_layers_are_a_placement(devices, count, text, counts):
    built = _four_layers()
    placement, layers = with_cpu_layers(built, devices, count)
    assert str(placement) == text and layers == {"": counts}
    plan = partition(built, placement, executors_of(placement, "cuda"), layers=layers)
    cpu = next(part for part in plan.devices if part.name == "cpu")
    assert len(cpu.layers[""]) == abs(count) and cpu.executor == "cpu"


@pytest.mark.parametrize(("devices", "count", "message"), [
    (None, 4, r"should be 1 .. 3, or -3 .. -1 for the last ones, is 4: .* 4 layers.*backend='cpu' keeps all"),
    ("0;1;2;3", 1, "cpu_layers should be 0, is 1"), ("cpu;0", 1, "'cpu;0' names it already")])
def test_cpu_layers_that_cannot_be(devices, count, message):
    with pytest.raises(DeviceError, match=message):
        with_cpu_layers(_four_layers(), devices, count)


def test_cpu_layers_of_encoder_and_decoder():
    built, _, _ = short_model("m2m100")
    placement, layers = with_cpu_layers(built, None, -1)
    assert str(placement) == "0;cpu" and layers == {"enc.": (2, 1), "dec.": (1, 1)}
    plan = partition(built, placement, executors_of(placement, "cuda"), layers=layers)
    assert plan.devices[1].layers == {"enc.": range(2, 3), "dec.": range(1, 2)}


def _four_layers():
    return random_network(Shape(4, 32, 2, 1, 32, 40, 64), "F16", fuse=False)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("options", [
    {"cpu_layers": 1}, {"cpu_layers": -1, "host_embeddings": True, "host_kv_percent": 100},
    {"devices": "0;cpu", "kv_k": "q8", "kv_v": "q4"}],
    ids=str)
@pytest.mark.merge
def test_the_same_greedy_tokens(monkeypatch, folder, options):
    options = dict(options)
    monkeypatch.setenv("NUMFLOW_CUDA", "simulator")
    prompt, kept = [1, 7, 30, 4], {"max_tokens": 5, "ignore_eos": True}
    kv = {"kv_k": options.pop("kv_k", "f16"), "kv_v": options.pop("kv_v", "f32")}
    same = {"activations": "f32", "threads": 1, **kv}
    with numflow.load(folder, **same) as model:
        expected = model.generate(prompt, **kept).ids
    with numflow.load(folder, "cuda", **same, **options) as model:
        assert {part.executor for part in model.program.plan.devices} == {"cpu", "cuda"}
        assert (SAMPLE in model.program.can) == (options.get("cpu_layers") == 1)  # where the logits are
        assert model.generate(prompt, **kept).ids == expected


def test_on_the_command_line(monkeypatch, folder, capsys):
    monkeypatch.setenv("NUMFLOW_CUDA", "simulator")
    code, _, err = _numflow(capsys, "bench", "-m", folder, "--device", "cuda", "--cpu-layers", "-2")
    assert code and "--cpu-layers should be 1 .. 1, or -1 .. -1 for the last ones, is -2" in err
    code, _, err = _numflow(capsys, "generate", "-m", folder, "--cpu-layers", "1", "x")
    assert code and "--cpu-layers 1 is for GPUs (--device cuda); backend 'cpu' has no such option" in err


def test_what_cannot_be(monkeypatch, folder):
    with pytest.raises(RequestError, match=r"cpu_layers=1 is for GPUs \(backend='cuda'\)"):
        numflow.load(folder, cpu_layers=1)
    with pytest.raises(RequestError, match="backend 'reference' has no such option"):
        numflow.load(folder, "reference", cpu_layers=-1)
    with pytest.raises(DeviceError, match="position 1: expected a device"):
        numflow.load(folder, "cuda", devices="gpu;0")
    with pytest.raises(DeviceError, match="transport='processes' is for devices of the CPU"):
        numflow.load(folder, "cuda", devices="0;1", transport="processes")
    with pytest.raises(DeviceError, match="backend='cpu' runs models without"):
        _without_a_driver(monkeypatch, folder)


def _without_a_driver(monkeypatch, folder):
    from numflow.cuda.compiler import compat

    monkeypatch.delenv("NUMFLOW_CUDA", raising=False)
    try:
        compat.driver()
    except DeviceError:
        numflow.load(folder, "cuda", cpu_layers=1)
    else:
        pytest.skip("this machine has a GPU")


def test_the_planner_prices_both(capsys):
    code, out, _ = _numflow(capsys, "plan", "--shape", "7b", "--cluster", "rtx4090-host", "--devices", "cpu;0",
                            "--memory", "64GB,6GB", "--weights", "q8", "--context", "512", "--json")
    assert code == 0
    found = json.loads(out)["candidates"]
    best = found[0]
    assert best["fits"] and set(best["memory"]) == {"cpu", "0"} and best["devices"].startswith("cpu*")
    assert not next(c for c in found if c["devices"] == "0")["fits"]


@pytest.mark.parametrize("weights", ["F16", "q4"])
@pytest.mark.merge
def test_memory_is_told_as_each_executor_holds_it(weights):
    from numflow.cpu import estimate as cpu
    from numflow.cuda import estimate as cuda

    network, checkpoint = random_network(Shape(2, 32, 2, 1, 32, 40, 64), weights, fuse=False)
    program = mixed(network, checkpoint, "cpu;0", kv_k="f16", kv_v="f32")
    device = DeviceSpec("some", 1e9, 1e9, 1e9)
    prices = Prices(program.plan, Cluster("here", {"cpu": device, "0": device}, Link(1e9, 0)), holdings={
        name: Holding(of.weight_bytes, lambda cache, of=of: of.cache_bytes(cache, "f16", "f32"))
        for name, of in (("cpu", cpu), ("cuda", cuda))})
    program.reserve(3)
    predicted = prices.memory(3 * program.block_size, 1).values()
    assert [memory.weights for memory in predicted] == pytest.approx(program.device_weights_bytes, rel=0.01)
    assert [memory.cache for memory in predicted] == pytest.approx(program.device_kv_bytes, rel=0.01)
    program.close()
