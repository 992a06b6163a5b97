"""`bench`: all requested sizes, comparisons, and the cost of steps by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from numflow.engine.measure.bench import bench
from numflow.engine.measure.bench_runs import compare
from numflow.engine.measure.profile import LeastWork, cost
from numflow.errors import RequestError
from numflow.network.cost import Workload
from numflow.ops import Buffer, Cache, Network, Step, View, Weight
from tests.engine.tiny import write_checkpoint

LIMITS = SimpleNamespace(read_gb_s=10.0, f32_gop_s=100.0, int8_gop_s=400.0, bf16_gop_s=200.0)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"))
    return bench(folder, (20, 8, 33), 4, 2, contexts=(0, 40), batches=(1, 3), profiled=True, threads=2)


@pytest.mark.merge
def test_every_size_is_measured(result):
    assert result["prompt_tokens"] == 20
    assert {key: list(result[key]) for key in ("prefill", "decode", "batched")} == {
        "prefill": ["8", "33"], "decode": ["0", "40"], "batched": ["1", "3"]}
    for sizes in (result["prefill"], result["decode"], result["batched"]):
        for spread in sizes.values():
            assert len(spread["samples"]) == 2
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert json.loads(json.dumps(result)) == result


def test_the_profile_has_every_op(result):
    assert result["limits"]["threads"] == result["threads"] == 2
    assert 1 < result["limits"]["read_gb_s"] < 2000 and 1 < result["limits"]["f32_gop_s"] < 1e5
    for rows in result["profile"].values():
        assert {"embed", "rms_norm", "attention", "cache_write", "rope"} <= {row["op"] for row in rows}
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert all(row["microseconds"] >= 0 for row in rows)
        head = next(row for row in rows if row["op"] == "linear output")
        assert head["megabytes"] == pytest.approx((64 * 32 + 32 + 50) * 4 / 1e6)  # rows come in whole tiles of 16


def test_speeds_are_compared(result):
    faster = json.loads(json.dumps(result))
    for sizes in (faster["prefill"], faster["batched"]):
        for spread in sizes.values():
            spread["median"] *= 2
    del faster["batched"]["3"]
    ratios = {row["what"]: row["ratio"] for row in compare(faster, result)}
    assert ratios == {"prefill_tok_s": 1, "decode_tok_s": 1, "prompt of 8": 2, "prompt of 33": 2,
                      "decoding after 0": 1, "decoding after 40": 1, "1 sequences": 2}


def test_sizes_are_checked(tmp_path):
    for options, message in (({"prompt_tokens": ()}, "at least one length"), ({"contexts": (-1,)}, "contexts"),
                             ({"batches": (0,)}, "batches"), ({"repeat": 0}, "repeat")):
        with pytest.raises(RequestError, match=message):
            bench(tmp_path, **options)


def test_other_backends_have_no_profile(tmp_path):
    with pytest.raises(RequestError, match="no profile: use the cpu"):
        bench(write_checkpoint(tmp_path), 4, 2, 1, profiled=True, backend="reference")


def network() -> Network:
    buffers = {name: Buffer(name, "tokens", 64) for name in ("x", "y")}
    weights = {"w": Weight("w", (64, 64)), "e": Weight("e", (512, 64), groups=8)}
    buffers["r"] = Buffer("r", "routes", 64)
    buffers["ids"] = Buffer("ids", "tokens", 2, "i32")
    steps = (Step("moe_route", (View("x", 0, 8),), (View("ids", 0, 2), View("y", 0, 2))),)
    return Network("toy", {"main": steps}, buffers, weights, {"c": Cache("c", 2, 16, 16)}, {}, {})


class FakeProgram:
    """Bytes and arithmetic of weights as dicts; keys and values of two bytes."""

    block_bytes, block_size = 2 * 64 * 2 * 32, 64
    kv_bytes, blocks, cross_block_bytes = 4 * block_bytes, 4, 0

    def weight_bytes(self, name):
        return {"w": 4096, "e": 8 * 4096}[name]

    def arithmetic(self, step):
        return {"linear": "int8", "head_linear": "bf16"}.get(step.op, "f32")


def of(step, tokens, context):
    return cost(step, network(), FakeProgram(), Workload(1, tokens, context))


def test_costs():
    x, y = View("x", 0, 64), View("y", 0, 64)
    linear = of(Step("linear", (x,), (y,), {"weight": "w"}), 10, 0)
    assert linear == LeastWork(4096 + 10 * 128 * 4, 0.0, 2.0 * 10 * 64 * 64)
    assert linear.seconds(LIMITS) == pytest.approx(max(linear.nbytes / 10, linear.int8 / 400) / 1e9)
    pairs = of(Step("head_linear", (x,), (y,), {"weight": "w"}), 10, 0)
    assert (pairs.bf16, pairs.f32) == (linear.int8, 0)
    assert LeastWork(0, bf16=2.0).seconds(LIMITS) == pytest.approx(1e-11)
    assert (linear + pairs).operations == 2 * linear.operations
    experts = Step("expert_linear", (x, View("ids", 0, 2)), (View("r", 0, 64),), {"weight": "e"})
    assert of(experts, 1, 0).f32 == 2 * 2 * 64 * 64
    two = 1 - (7 / 8) ** 2  # of eight experts, when two are chosen at random, perhaps the same one
    assert of(experts, 1, 0).nbytes == pytest.approx(8 * 4096 * two + (64 + 2 + 2 * 64) * 4)
    assert of(experts, 100, 0).nbytes - of(experts, 50, 0).nbytes == pytest.approx(50 * (64 + 2 + 2 * 64) * 4, rel=0.01)
    whole = Step("attention", (x,), (y,), {}, {"cache": "c", "heads": 4, "scale": 1.0})
    assert of(whole, 3, 5).f32 == 2 * (6 + 7 + 8) * 4 * 32
    assert of(whole, 1, 99).nbytes == pytest.approx(100 * 2 * 32 * 2 + 128 * 4)
    window = Step("attention", (x,), (y,), {}, {"cache": "c", "heads": 4, "scale": 1.0, "window": 8})
    assert of(window, 1, 99).f32 == 2 * 8 * 4 * 32
    assert np.isclose(of(window, 1, 99).nbytes, 8 * 2 * 32 * 2 + 128 * 4)


def test_options_of_loading_are_told(tmp_path):
    """Two results differ in the settings."""
    folder = write_checkpoint(tmp_path)
    assert bench(folder, 4, 2, 1, threads=1, transport="threads")["options"] == {}
    placed = bench(folder, 4, 2, 1, threads=1, devices="0;1", transport="threads", kv="f16")
    assert placed["options"] == {"devices": "0;1", "transport": "threads", "kv": "f16"}
