"""LoRA adapters on the simulator: equal to merged weights in any batch, loaded and unloaded; also on two devices."""

from contextlib import closing

import numpy as np
import pytest

import numflow
from numflow import network
from numflow.cuda.adapters.tables import AdapterTables
from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.network import WeightSource
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.merge import merged
from numflow.network.adapters.parts import AdaptedPart
from numflow.network.adapters.steps import adaptable, parts_of
from tests.engine.make_activated import TEXTS, write_activated
from tests.formats.peft import PREFIX, pair, write_adapter
from tests.network.test_adapters import logits_of, program_of
from tests.partition.test_adapters import adapters_of
from tests.specs.case import load_case, memory_checkpoint

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
IDS = [20, 31, 45]
Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"


@pytest.mark.slow  # .ci/cuda runs these
@pytest.mark.parametrize("name", ["llama_biased", "gpt_oss"])
def test_rows_that_add_and_weights_that_are_sums(name):
    case = load_case(name)
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec = network.choose_spec(found)
    built = adaptable(network.build(spec, found), found)
    with closing(Program(built, WeightSource(built, found), activations="f32", gpu=Simulated(seed=1))) as program:
        program.reserve(1, 1)
        bare = logits_of(program, case, built, -1)
        for number, (adapter, scale) in enumerate(adapters_of(found)):
            some = merged(found, spec, [(adapter, scale)])
            program.set_adapter(number, parts_of(built, found, fitted(adapter, found, spec), scale))
            whole = network.build(spec, some)
            with closing(program_of("reference", whole, some)) as sums:
                expected = logits_of(sums, case, whole, -1)
            assert np.abs(logits_of(program, case, built, number) - expected).max() < 1e-4 * expected.std()
        assert np.array_equal(logits_of(program, case, built, -1), bare)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of different ranks, one with a table, a head and a bias."""
    place = tmp_path_factory.mktemp("adapters")
    one = pair(Q.format(0), (32, 32), 3, 0) | pair(DOWN.format(1), (32, 48), 3, 0)
    two = pair(Q.format(1), (32, 32), 8, 1) | pair("lm_head", (264, 32), 8, 1)
    two |= pair("model.embed_tokens", (32, 264), 8, 1, "lora_embedding_{}")
    two |= {f"{PREFIX}{DOWN.format(1)}.lora_B.bias": np.linspace(-1, 1, 32, dtype=np.float32)}
    two |= pair(DOWN.format(1), (32, 48), 8, 1)
    return {"one": write_adapter(place / "one", one, r=3), "two": write_adapter(place / "two", two, r=8)}


@pytest.fixture(scope="module")
def expected(base, adapters):
    with numflow.load(base, activations="f32", adapters=adapters) as model:
        return {name: model.logits(IDS, adapter=name) for name in ("one", "two", None)}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"devices": "0&1"}, {"devices": "0;1"}], ids=str)
def test_requests_choose(base, adapters, expected, more):
    order = ["two", None, "one"]
    with numflow.load(base, backend="cuda", gpu="simulator", activations="f32", adapters=adapters, **more) as model:
        for name, rows in zip(order, model.logits_batch([IDS] * 3, adapters=order), strict=True):
            assert np.abs(rows - expected[name]).max() < 1e-4 * expected[name].std()
        model.adapters.unload("one")
        model.adapters.load("three", (adapters["one"], 0.0))
        (rows,) = model.logits_batch([IDS], adapters=["three"])
        assert np.abs(rows - expected[None]).max() < 1e-4 * expected[None].std()


@pytest.mark.slow
def test_an_adapter_starts_at_its_invocation_tokens(base, tmp_path):
    adapters = {"one": write_activated(tmp_path)}
    with numflow.load(base, activations="f32", adapters=adapters) as model:
        expected = model.logits_batch(TEXTS[:3], adapters=["one"] * 3)
        greedy = model.generate(TEXTS[1], 3, ignore_eos=True, adapter="one").ids
    with numflow.load(base, backend="cuda", gpu="simulator", activations="f32", adapters=adapters) as model:
        for rows, wanted in zip(model.logits_batch(TEXTS[:3], adapters=["one"] * 3), expected, strict=True):
            assert np.abs(rows - wanted).max() < 1e-4 * wanted.std()
        assert model.generate(TEXTS[1], 3, ignore_eos=True, adapter="one").ids == greedy


def test_matrices_come_and_go(base):
    """Freed memory is reused, and remaining matrices keep their content when the memory grows."""
    found = numflow.formats.open_checkpoint(base)
    built = adaptable(network.build(network.choose_spec(found), found), found)
    device, rng = Simulated(seed=1), np.random.default_rng(0)
    tables = AdapterTables(built, device)
    names, held = list(tables._experts)[:2], {}
    for turn in range(60):
        number, rank = int(rng.integers(9)), int(rng.integers(1, 12))
        bias, scale = (rng.random(7, np.float32) if turn % every else None for every in (3, 2))
        part = AdaptedPart(rng.random((rank, 5), np.float32), rng.random((7, rank), np.float32), bias, scale)
        held[number] = {names[turn % 2]: [part]} if turn % 5 else None
        tables.put(number, held[number])
        assert tables.nbytes == sum(4 * sum(each.size for each in vars(part).values() if each is not None)
                                    for own in held.values() if own for (part,) in own.values())
        for other, own in held.items():
            for name in names:
                table, _ = tables.table(name)
                begin, rank, vectors, _ = device.download(table + 16 * other, 16).view(np.uint32)
                if not own or name not in own:
                    assert rank == vectors == 0
                    continue
                (part,) = own[name]
                flat = np.concatenate([each.reshape(-1) for each in (part.a, part.b.T, part.bias, part.scale)
                                       if each is not None])
                assert np.array_equal(device.download(tables.arena + 4 * int(begin), 4 * flat.size).view("f4"), flat)
                assert (rank, vectors) == (len(part.a), (part.bias is not None) + 2 * (part.scale is not None))
