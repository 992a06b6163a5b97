"""The planner's memory of devices against the memory that their programs use."""

import json
import math

import pytest

import numflow
from numflow.cli.app import app
from numflow.cpu import program as executor
from numflow.cpu.estimate import cache_bytes, weight_bytes
from numflow.cpu.state.cache import KVCache as CpuCache
from numflow.cuda.estimate import cache_bytes as of_gpu
from numflow.cuda.state.cache import KVCache as GpuCache
from numflow.cuda.survey import Notebook
from numflow.lab import machine
from numflow.lab.shapes import find_shape, random_network
from numflow.network import WeightSource, describe
from numflow.network.windows import BLOCK, cache_windows
from numflow.partition.cut.cut import partition
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link
from numflow.partition.price.price import Prices
from numflow.partition.run.program import PlanProgram
from tests.conftest import shared
from tests.partition.plans import model_of

BLOCKS = 3
SIZES = {"layers": 2, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocabulary": 300}


@pytest.mark.parametrize("devices", ["0", "0;1", "0&1"])
@pytest.mark.parametrize(("weights", "kv"), [("F16", "f32"), ("Q4_0", "f16"), *(
    pytest.param(*types, marks=pytest.mark.merge) for types in (("Q8_0", "q8"), ("q3h", "q3h")))])
@pytest.mark.thin(5)
def test_predictions_are_within_a_hundredth(devices, weights, kv):
    network, checkpoint = random_network(find_shape("1b", **SIZES), weights, fuse=False)
    plan = partition(network, devices)
    device = DeviceSpec("virtual", 1e9, 1e9, 1e9)
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


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v4_ratios", "deepseek_v4_heavy"])
def test_entries_take_what_is_said(name):
    """float32 entries, as many per block as windows end in it: 16 for windows of 4 tokens, 22 of 3, 1 of 128."""
    network, *_ = model_of(name)
    for cache in network.caches.values():
        on_cpu, on_gpu = CpuCache(cache, BLOCK, "f16", "f16"), GpuCache(Notebook(), cache, BLOCK, "f16", "f16")
        assert (on_cpu.block_bytes, on_gpu.block_bytes) == (BLOCK * cache_bytes(cache), BLOCK * of_gpu(cache))
    plain = {own: 4 * cache.k_dim * -(-BLOCK // cache.every) if cache.every else 2 * cache.k_dim * BLOCK
             for own, cache in network.caches.items()}
    whole = sum(plain[own] for own, window in cache_windows(network).items() if not window)
    assert describe.cache_bytes_per_token(network) == math.ceil(whole / BLOCK)
    assert describe.cache_bytes(network, 50 * BLOCK) == 50 * whole + describe.window_bytes(network)


FIGURES = {"memory": 4e9, "bandwidth": 1e10, "operations": 1e11, "step": 1e-6, "host_bandwidth": 1e10, "latency": 1e-6,
           "crowded": 1e-5, "cores": 2.0, "start": 0.0, "start_each": 0.0}


@pytest.mark.parametrize(("family", "devices", "options"), [
    ("opt_350m", "0&1", {}),                      # tables of positions are float32, keys and values of floats too
    ("m2m100_418m", "0;1", {"weights": "q8"}),    # an encoder's memory
    ("bert_base_multilingual_cased", "0&1", {}),
    pytest.param("mixtral_8x7b", "5;2&0", {"weights": "q3h", "kv": "q4"}, marks=pytest.mark.merge),
])
@pytest.mark.thin(2)
def test_the_command_tells_what_loading_takes(family, devices, options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measure", lambda count: FIGURES)
    folder = shared("fixtures", family)
    with numflow.load(folder, devices=devices, threads=1, progress=False, **options) as model:
        program, blocks = model.program, 1
        program.reserve(blocks, blocks)
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with pytest.raises(SystemExit) as end:
            app(["plan", "-m", str(folder), "--devices", devices, "--context", str(model.context), "--json", *words])
        assert not end.value.code
        found = json.loads(capsys.readouterr().out)
        asked = next(c["memory"] for c in found["candidates"] if c["devices"] == devices)
        part = blocks * program.block_size / found["context"]
        assert [m["weights"] for m in asked.values()] == pytest.approx(program.device_weights_bytes, rel=0.01)
        assert [m["kv"] * part for m in asked.values()] == pytest.approx(program.device_kv_bytes, rel=0.01)
