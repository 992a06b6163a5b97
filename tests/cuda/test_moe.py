"""Experts on the device: sorted routes, grouped products with every kind of matrix, and a whole toy model."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.lang.kernel import REGISTRY
from numflow.cuda.lang.parameters import IntRows, Rows
from numflow.cuda.moe.route import Routing, route_kernel
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from numflow.reference.moe import moe_route
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import experts_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
KINDS = ("F16", "BF16", "q4", "q3h", "Q6_K")


@pytest.mark.parametrize(("tokens", "chosen", "experts", "first", "tile"), [
    (1, 1, 1, 0, 16), (150, 2, 7, 0, 16), (40, 3, 4, 2, 64), (5, 4, 40, 0, 16)])
def test_routes_in_the_order_of_experts(tokens, chosen, experts, first, tile):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, experts + first + 1, (tokens, chosen), dtype=np.int32)
    routes, stride = tokens * chosen, 32
    most = routes // tile + min(experts, routes)
    device, padded = Simulated(seed=tokens), np.full((tokens, stride), 10**6, np.int32)
    padded[:, :chosen] = ids
    order, tiles, source, counts = (device.alloc(n) for n in (8 * routes, 16 * most, padded.nbytes, 64))
    device.upload(source.at(), padded)
    device.upload(counts.at(), np.array([tokens, 0, routes, 1], np.int32))
    device.launch(Launch(REGISTRY["expert_groups"], (experts, 1, 1), (
        order.at(), tiles.at(), source.at(), stride, counts.at(), chosen, first, experts, tile, most)))
    flat = ids.ravel() - first
    here = np.flatnonzero((flat >= 0) & (flat < experts))
    expected = here[np.argsort(flat[here], kind="stable")]
    found = device.download(order.at(), 8 * len(here)).view(np.int32).reshape(-1, 2)
    np.testing.assert_array_equal(found, np.stack([expected, expected // chosen], 1))
    wanted, begin = [], 0
    for expert, count in enumerate(np.bincount(flat[here], minlength=experts).tolist()):
        wanted += [[expert, begin + at, begin + min(at + tile, count)] for at in range(0, count, tile)]
        begin += count
    found = device.download(tiles.at(), tiles.nbytes).view(np.int32).reshape(-1, 4)
    assert found[:len(wanted), :3].tolist() == wanted
    assert (found[len(wanted):, 0] == -1).all()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer"])
def test_routes_of_what_is_no_number(score, grouped):
    """A token with NaN logits is routed to valid experts, and other tokens to theirs."""
    if grouped and score == "sparsemixer":
        pytest.skip("has no groups")
    experts, chosen, stride = 40, 3, 64
    logits = np.random.default_rng(1).standard_normal((3, stride)).astype(np.float32)
    logits[1, :experts] = np.nan
    device, gates, ids = Simulated(seed=3), np.full((3, stride), 9, np.float32), np.full((3, stride), -7, np.int32)
    memory = [device.alloc(array.nbytes) for array in (ids, gates, logits)]
    for held, array in zip(memory, (ids, gates, logits), strict=True):
        device.upload(held.at(), array)
    counts = device.alloc(64)
    device.upload(counts.at(), np.array([3, 0, 3 * chosen, 1], np.int32))
    groups = {"groups": 4, "top_groups": 2, "group_best": 2} if grouped else {"groups": 1, "top_groups": 1,
                                                                              "group_best": 2}
    of_logits, kernel = Rows(memory[2].at(), stride), route_kernel(score, False, grouped, False, False)
    device.launch(Launch(kernel, (3, 1, 1), (
        IntRows(memory[0].at(), stride), Rows(memory[1].at(), stride), of_logits, of_logits, None, counts.at(),
        experts, chosen, None, Routing(*groups.values(), 0, 0.0, 1.0, 0.2))))
    found = device.download(memory[0].at(), ids.nbytes).view(np.int32).reshape(3, stride)
    assert ((found[1, :chosen] >= 0) & (found[1, :chosen] < experts)).all()
    assert (found[:, chosen:] == -7).all()
    expected, _ = moe_route(logits[::2, :experts], width=chosen, score=score, normalize=False, scale=1.0, jitter=0.1,
                            **groups)
    np.testing.assert_array_equal(found[::2, :chosen], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_routes(kind):
    """Tensor cores for the prompt, then the matrix-vector kernels for two tokens."""
    case = experts_case(kind, 20, 256, experts=3, chosen=2, bias=True)
    case = replace(case, schedule=(((0, 11),), ((0, 1), (1, 1))))
    actual = run_case(case, Program, gpu=Simulated(seed=1))
    for a, e, bound in zip(actual, run_case(case, Reference), (1e-2 if kind == "BF16" else 4e-3, 3e-2), strict=True):
        assert error(a, e) < bound


@pytest.mark.slow
@pytest.mark.parametrize(("n", "tokens", "chosen", "first", "held"), [
    (130, 5, 2, 0, 3), (9, 40, 2, 1, 2), (5, 70, 1, 0, 3)])
def test_odd_shapes_and_experts_of_other_devices(n, tokens, chosen, first, held):
    case = experts_case("F16", n, 64, experts=3, chosen=chosen, first=first, held=held)
    case = replace(case, schedule=(((0, tokens),),))
    actual = run_case(case, Program, gpu=Simulated(seed=2))
    assert error(actual[0], run_case(case, Reference)[0]) < 4e-3


@pytest.mark.slow
def test_a_graph_finds_the_tiles_of_each_batch():
    """A bucket of four tokens: three sequences, then four, then three others, by one CUDA graph."""
    case = replace(experts_case("F16", 20, 64, experts=3, chosen=2), schedule=tuple(
        tuple((sequence, 1) for sequence in some) for some in ((0, 1, 2), (0, 1, 2, 3), (3, 1, 2), (0, 2, 3))))
    fake = FakeDriver()
    replayed = run_case(case, Program, gpu=Gpu(fake, 0, fake_binary), rows=8)
    assert fake.replays == 3
    for a, b in zip(replayed, run_case(case, Program, gpu=Simulated(seed=1)), strict=True):
        np.testing.assert_array_equal(a, b)


def write_experts(folder):
    """A tiny checkpoint with four experts, two for each token, as published on model hubs, in float16."""
    rng, d, f, v, kv, experts = np.random.default_rng(0), 32, 32, 40, 16, 4
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": d, "vocab_size": v,
              "intermediate_size": f, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
              "num_local_experts": experts, "num_experts_per_tok": 2, "tie_word_embeddings": False, "bos_token_id": 1,
              "eos_token_id": 2, "torch_dtype": "float16"}
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    at = "model.layers.0."
    shapes |= {at + f"self_attn.{name}_proj.weight": (rows, d)
               for name, rows in (("q", d), ("k", kv), ("v", kv), ("o", d))}
    shapes |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,),
               at + "block_sparse_moe.gate.weight": (experts, d)}
    for expert in range(experts):
        name = at + f"block_sparse_moe.experts.{expert}."
        shapes |= {name + "w1.weight": (f, d), name + "w2.weight": (d, f), name + "w3.weight": (f, d)}
    tensors = {name: (0.3 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float16)
               for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp("experts"))


def generated(folder, **options):
    """Ids of a greedy text and of two sampled ones side by side, and the program's facts."""
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}
    with numflow.load(folder, **options) as model:
        greedy = model.generate([1, 7, 30], max_tokens=4, ignore_eos=True).ids
        return [greedy, *(choice.ids for choice in model.generate(
            [3, 9], max_tokens=3, ignore_eos=True, n=2, **drawn).choices)]


@pytest.mark.slow
def test_a_model_of_experts(folder):
    """The CPU's tokens, greedy and sampled, on the simulator and by CUDA graphs of a fake driver."""
    expected = generated(folder, backend="cpu", activations="f32")
    assert generated(folder, backend="cuda", activations="f32", gpu="simulator") == expected
    fake = FakeDriver()
    assert generated(folder, backend="cuda", activations="f32", gpu=Gpu(fake, 0, fake_binary)) == expected
    assert fake.replays
    assert fake.memory == {}


@pytest.mark.slow
def test_a_prompt_through_grouped_products(folder):
    ids = [1, 7, 30, 4, 9, 12, 33, 2, 18, 39, 11]
    with numflow.load(folder, backend="cuda", gpu="simulator") as model:
        assert any("grouped" in name for name in names(model))
        found = model.logits(ids)
    with numflow.load(folder, backend="reference") as model:
        expected = model.logits(ids)
    assert error(found, expected) < 3e-2
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9


def names(model):
    """Names of the kernels of a prompt of 11 tokens."""
    from numflow.cuda.device.call import Sizes

    return {work.kernel.name for work in model.program.launches(Sizes((11, 11, 22, 1), 11))}
