"""RWKV-4 in sizes other than its fixture's, against its formulas as plain sums in float64."""

import numpy as np
import pytest

from numflow import network
from numflow.cpu.program import Program
from numflow.network import WeightSource
from numflow.reference.program import Program as Reference
from tests.specs.case import memory_checkpoint, relative_error, run
from tests.specs.test_recurrent import run as run_pieces
from tests.specs.weights import values

VOCABULARY, WIDTH = 67, 40
IDS = [(7 * i * i + 3 * i + 1) % VOCABULARY for i in range(37)]
# Sizes: channels of attention, columns of the feed-forward part (None: as the class fills them), layers.
VARIANTS = {"narrow": (24, 56, 2), "wide": (72, None, 1), "plain": (None, None, 3)}


def model(channels, inner, layers):
    """(checkpoint, float64 tensors)."""
    config = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "hidden_size": WIDTH,
              "vocab_size": VOCABULARY, "attention_hidden_size": channels, "intermediate_size": inner,
              "num_hidden_layers": layers, "context_length": 64, "layer_norm_epsilon": 1e-3, "rescale_every": 1,
              "tie_word_embeddings": False}
    channels, inner = channels or WIDTH, inner or 4 * WIDTH
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    block = {f"{name}.{role}": shape for name in ("ln1", "ln2") for role, shape in norm.items()}
    block |= {"attention.time_decay": (channels,), "attention.time_first": (channels,),
              "attention.output.weight": (WIDTH, channels), "feed_forward.key.weight": (inner, WIDTH),
              "feed_forward.receptance.weight": (WIDTH, WIDTH), "feed_forward.value.weight": (WIDTH, inner)}
    block |= {f"attention.{name}.weight": (channels, WIDTH) for name in ("key", "value", "receptance")}
    block |= {f"attention.time_mix_{name}": (1, 1, WIDTH) for name in ("key", "value", "receptance")}
    block |= {f"feed_forward.time_mix_{name}": (1, 1, WIDTH) for name in ("key", "receptance")}
    tensors = {"rwkv.embeddings.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}
    tensors |= {f"rwkv.{name}.{role}": shape for name in ("blocks.0.pre_ln", "ln_out") for role, shape in norm.items()}
    tensors |= {f"rwkv.blocks.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    arrays = {name: values(name, shape).astype(np.float64) for name, shape in tensors.items()}
    return memory_checkpoint(config, tensors), arrays


def expected(tensors, layers):
    """Logits [T, V], by sums over all previous tokens: without a state or a running maximum.

    The residual stream is halved after every rescale_every layers, and the last norm has another epsilon.
    """
    def norm(x, name, eps=1e-3):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def product(x, part, role):
        share = tensors[f"{part}.time_mix_{role}"].reshape(-1)
        before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
        return (share * x + (1 - share) * before) @ tensors[f"{part}.{role}.weight"].T

    def gate(x):
        return 1 / (1 + np.exp(-x))

    x = norm(tensors["rwkv.embeddings.weight"][IDS], "rwkv.blocks.0.pre_ln")
    for layer in range(layers):
        at = f"rwkv.blocks.{layer}."
        u, part = norm(x, at + "ln1"), at + "attention"
        k, v, r = (product(u, part, role) for role in ("key", "value", "receptance"))
        rate, first = np.exp(tensors[part + ".time_decay"]), tensors[part + ".time_first"]
        found = np.empty_like(v)
        for t in range(len(IDS)):
            weights = np.exp(np.concatenate([k[:t] - rate * np.arange(t - 1, -1, -1)[:, None], k[t:t + 1] + first]))
            found[t] = (weights * v[:t + 1]).sum(0) / weights.sum(0)
        x = x + (gate(r) * found) @ tensors[part + ".output.weight"].T / 2**layer
        u, part = norm(x, at + "ln2"), at + "feed_forward"
        hidden = np.maximum(product(u, part, "key"), 0) ** 2
        x = (x + gate(product(u, part, "receptance")) * (hidden @ tensors[part + ".value.weight"].T) / 2**layer) / 2
    return norm(x, "rwkv.ln_out", 1e-5) @ tensors["head.weight"].T


@pytest.mark.parametrize("name", VARIANTS)
def test_any_sizes(name):
    checkpoint, tensors = model(*VARIANTS[name])
    built, wanted = network.build(network.choose_spec(checkpoint), checkpoint), expected(tensors, VARIANTS[name][2])
    for make in (Reference, Program):
        program = make(built, WeightSource(built, checkpoint), activations="f32")
        assert relative_error(run(program, IDS), wanted) < 1e-5
        program.close()


def test_bits_do_not_depend_on_the_cut_or_on_other_texts():
    checkpoint, _ = model(*VARIANTS["narrow"])
    built, ids = network.build(network.choose_spec(checkpoint), checkpoint), np.array(IDS)
    one, two = (Program(built, WeightSource(built, checkpoint), activations="f32", threads=n) for n in (1, 2))
    for program in (one, two):
        program.reserve(3)
    (whole,) = (np.array(y) for y in run_pieces(one, [(ids, 0, 1)]))
    for size in (1, 7):
        found = [np.array(run_pieces(two, [(ids[at:at + size], at, 2)])[0]) for at in range(0, len(ids), size)]
        np.testing.assert_array_equal(np.concatenate(found), whole)
    beside = [np.array(run_pieces(two, [(ids[::-1], 0, 0), (ids[:9], 0, 2)])[1]),
              np.array(run_pieces(two, [(ids[9:], 9, 2), (ids[3:9], 0, 1)])[0])]
    np.testing.assert_array_equal(np.concatenate(beside), whole)
    for program in (one, two):
        program.close()


def test_large_keys_do_not_overflow():
    """e^200 overflows float32; the weighted mean is finite."""
    checkpoint, tensors = model(*VARIANTS["plain"])
    big = {name: array * (40 if "attention.key" in name else 1) for name, array in tensors.items()}
    scaled = memory_checkpoint(checkpoint.config, {name: array.shape for name, array in big.items()},
                               make=lambda name, shape: big[name].astype(np.float32))
    built = network.build(network.choose_spec(scaled), scaled)
    wanted = expected(big, VARIANTS["plain"][2])
    for make in (Reference, Program):
        program = make(built, WeightSource(built, scaled), activations="f32")
        assert relative_error(run(program, IDS), wanted) < 1e-4
        program.close()
