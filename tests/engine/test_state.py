"""Recurrent states: the same bits for any chunks, in any batch, and after copies and swaps of slots."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from numflow.network.windows import STATE
from tests.conftest import shared

KINDS = ["conv", "full_attention", "conv"]
CONFIG = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 32, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 512,
          "intermediate_size": 48, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "layer_types": KINDS,
          "eos_token_id": 2}
TEXT = [4 + (7 * i * i + i) % 41 for i in range(330)]
PROMPTS = [TEXT[:200], [5, 6, 7], TEXT[:150], [*TEXT[:130], 9, 8], TEXT[100:240]]
MODEL = {"activations": "f32", "threads": 2}
NEW = 20


def write_recurrent(folder, kinds=KINDS):
    """A tiny decoder of short convolutions, with attention between them."""
    rng, d, f, kv = np.random.default_rng(1), 32, 48, 16
    shapes = {"model.embed_tokens.weight": (50, d), "model.embedding_norm.weight": (d,)}
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}."
        shapes |= {at + "operator_norm.weight": (d,), at + "ffn_norm.weight": (d,),
                   at + "feed_forward.w1.weight": (f, d), at + "feed_forward.w3.weight": (f, d),
                   at + "feed_forward.w2.weight": (d, f)}
        shapes |= {at + "conv.in_proj.weight": (3 * d, d), at + "conv.conv.weight": (d, 1, 4),
                   at + "conv.out_proj.weight": (d, d)} if kind == "conv" else {
            at + "self_attn.q_proj.weight": (d, d), at + "self_attn.k_proj.weight": (kv, d),
            at + "self_attn.v_proj.weight": (kv, d), at + "self_attn.out_proj.weight": (d, d),
            at + "self_attn.q_layernorm.weight": (8,), at + "self_attn.k_layernorm.weight": (8,)}
    tensors = {name: (0.4 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
               for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(
        {**CONFIG, "layer_types": kinds, "num_hidden_layers": len(kinds)}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recurrent(tmp_path_factory.mktemp("recurrent") / "model")


@pytest.fixture(scope="module")
def model(folder):
    with numflow.load(folder, **MODEL) as model:
        yield model


@pytest.fixture(scope="module")
def alone(model):
    """Greedy ids and log-probabilities of each prompt by itself."""
    return [facts(model.generate(prompt, **GREEDY)) for prompt in PROMPTS]


GREEDY = {"max_tokens": NEW, "ignore_eos": True, "temperature": 0.0, "logprobs": 0}


def drawn(model, prompt, **settings):
    """Ids of three samples."""
    with numflow.Engine(model) as engine:
        return [one.ids for one in engine.submit(prompt, n=3, **settings).results()]


def facts(generation):
    return generation.ids, [one.logprob for one in generation.logprobs]


def together(model, prompts=PROMPTS, **options):
    """Facts of requests that come at once, and the engine's counters."""
    settings = GREEDY | options.pop("settings", {})
    with numflow.Engine(model, **options) as engine:
        handles = [engine.submit(prompt, **settings) for prompt in prompts]
        return [facts(handle.result()) for handle in handles], engine.stats


def slots(model):
    return model.runner.pools[-1]


def test_the_state_does_not_depend_on_the_cut(folder, model):
    whole = model.logits(TEXT)
    for chunk in (1, 7, 64):
        with numflow.load(folder, chunk=chunk, **MODEL) as cut:
            np.testing.assert_array_equal(cut.logits(TEXT), whole)
    with numflow.load(folder, backend="reference") as reference:
        found = reference.logits(TEXT)
    assert np.abs(whole - found).max() < 1e-4 * found.std()
    changed = model.logits([*TEXT[:-4], TEXT[-4] + 1, *TEXT[-3:]])
    assert np.abs(changed[-1] - whole[-1]).max() > 0.01 * whole.std()


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"max_step_tokens": 30}, {"max_batch": 2}])
@pytest.mark.thin(2)
def test_company_changes_no_bit(model, alone, options):
    for settings in ({}, {"speculate": "ngram"}):
        assert together(model, settings=settings, **options)[0] == alone
    assert slots(model).window == STATE and slots(model).allocator.used == 0


def least(model):
    """Bytes that the longest prompt needs."""
    runner, size = model.runner, model.program.block_size
    return (-(-(max(map(len, PROMPTS)) + NEW) // size) + -(-slots(model).size // runner.unit)) * runner.unit


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_states_make_place_and_come_back(folder, model, preemption):
    """Texts that come to need another block, for which there is none."""
    prompts = [TEXT[:120], TEXT[50:110], TEXT[9:70], TEXT[3:65]]
    alone = [facts(model.generate(prompt, **GREEDY)) for prompt in prompts]
    with numflow.load(folder, **MODEL) as small:
        for settings in ({}, {"speculate": "ngram"}):
            found, stats = together(small, prompts, kv_memory=6 * small.runner.unit, preemption=preemption,
                                    settings=settings)
            assert found == alone and stats["kv_bytes"] <= 6 * small.runner.unit
        assert stats["preemptions"] > 0 and (preemption == "swap") == (stats["swaps"] > 0)


def test_a_text_goes_on_from_the_nearest_snapshot(folder, alone):
    with numflow.load(folder, **MODEL) as model, numflow.Engine(model) as engine:
        def tokens_found(prompt):
            before = engine.stats["prefix_tokens"]
            found = facts(engine.submit(prompt, **GREEDY).result())
            return found, engine.stats["prefix_tokens"] - before

        first, again = tokens_found(PROMPTS[0]), tokens_found(PROMPTS[0])
        assert first == (alone[0], 0) and again == (alone[0], 192)  # the last border of the prompt
        # Another text parts from it within the third block: no snapshot lies there yet, and then one does.
        assert tokens_found(PROMPTS[2]) == (alone[2], 0)
        assert tokens_found(PROMPTS[3]) == (alone[3], 128)
        answered = [*PROMPTS[0], *alone[0][0]]
        assert tokens_found([*answered, 7, 7])[1] == 192
        assert slots(model).allocator.used == 0 and slots(model).allocator.cached == 2


def test_snapshots_stay_within_their_budget(folder, alone):
    with numflow.load(folder, **MODEL) as model:
        memory = 2 * least(model)
        with numflow.Engine(model, kv_memory=memory) as engine:
            for _ in range(3):
                for prompt, expected in zip(PROMPTS, alone, strict=True):
                    assert facts(engine.submit(prompt, **GREEDY).result()) == expected
                    assert engine.stats["kv_bytes"] <= memory
            assert engine.stats["prefix_tokens"] > 0


def test_a_long_answer_does_not_push_prompts_out(folder):
    """Snapshots of generated text are evicted by the next ones."""
    with numflow.load(folder, **MODEL) as model, numflow.Engine(model) as engine:
        engine.submit(PROMPTS[0], **GREEDY).result()
        long = GREEDY | {"max_tokens": 300}
        before = engine.submit(PROMPTS[1], **long).result()
        assert slots(model).allocator.capacity <= 5
        prefix = engine.stats["prefix_tokens"]
        engine.submit(PROMPTS[0], **GREEDY).result()
        assert engine.stats["prefix_tokens"] - prefix == 192
        engine.submit([*PROMPTS[1], *before.ids, 5], **GREEDY).result()  # and an answer goes on from one of its last
        assert engine.stats["prefix_tokens"] - prefix - 192 >= 192


def test_samples_and_beams_have_states_of_their_own(folder, model):
    sampled = {"temperature": 0.9, "seed": 3, "max_tokens": NEW, "ignore_eos": True}
    apart = [drawn(model, prompt, **sampled) for prompt in PROMPTS[:3]]
    assert len({tuple(ids) for ids in apart[0]}) == 3
    for at, prompt in enumerate(PROMPTS[:3]):
        assert model.generate(prompt, **sampled).ids == apart[at][0]
    beams = [model.generate(prompt, num_beams=4, max_tokens=NEW, ignore_eos=True).ids for prompt in PROMPTS[:3]]
    with numflow.load(folder, backend="reference") as reference:
        assert [reference.generate(prompt, num_beams=4, max_tokens=NEW, ignore_eos=True).ids
                for prompt in PROMPTS[:3]] == beams
    with numflow.Engine(model, max_step_tokens=50) as engine:
        handles = [engine.submit(prompt, n=3, **sampled) for prompt in PROMPTS[:3]]
        searches = [engine.submit(prompt, num_beams=4, max_tokens=NEW, ignore_eos=True) for prompt in PROMPTS[:3]]
        assert [[one.ids for one in handle.results()] for handle in handles] == apart
        assert [handle.result().ids for handle in searches] == beams


def test_drafts_that_were_wrong_leave_no_trace(folder, model, alone):
    """A model that drafts for itself is right; one with other weights hardly ever."""
    with numflow.load(folder, draft=folder, **MODEL) as drafted:
        found, stats = together(drafted, settings={"speculate": "draft", "draft_tokens": 4})
        assert found == alone and stats["acceptance_rate"] == 1.0
    with numflow.load(folder, draft=write_recurrent(folder.parent / "other", ["conv", "conv", "conv"]),
                      **MODEL) as drafted:
        found, stats = together(drafted, settings={"speculate": "draft", "draft_tokens": 4})
        assert found == alone and stats["drafts"] > 0 and stats["acceptance_rate"] < 0.9


def test_a_model_without_attention(tmp_path):
    folder = write_recurrent(tmp_path / "plain", ["conv", "conv"])
    with numflow.load(folder, **MODEL) as model:
        expected = [facts(model.generate(prompt, **GREEDY)) for prompt in PROMPTS]
        assert model.runner.unit == slots(model).size and "texts of any length" in str(model.runner.memory)
        assert together(model, kv_memory=4 * slots(model).size)[0] == expected
    with numflow.load(folder, backend="reference") as model:
        assert [model.generate(prompt, **GREEDY).ids for prompt in PROMPTS] == [ids for ids, _ in expected]


def test_continuations_of_one_context(model):
    context, ends = TEXT[:90], [[5, 6, 7], [9], TEXT[90:100]]
    assert model.loglikelihoods([(context, end) for end in ends]) == [model.loglikelihood(context, end) for end in ends]


@pytest.mark.parametrize("devices", ["0;1", "0&1", "0;1&2"])
def test_devices_share_states_out(folder, model, devices):
    """By layer the same bits; by tensor each device has the state of its channels."""
    with numflow.load(folder, devices=devices, activations="f32", threads=1) as placed:
        whole, found = model.logits(TEXT), placed.logits(TEXT)
        assert np.abs(whole - found).max() < 1e-5 * whole.std() and (devices != "0;1" or (whole == found).all())
        assert slots(placed).size == slots(model).size
        for part in placed.program.plan.devices:
            sizes = [state.size for state in part.network.states.values()]
            assert sizes == [3 * 32] * len(sizes) if devices == "0;1" else all(size <= 3 * 32 for size in sizes)
        expected = [model.generate(prompt, **GREEDY).ids for prompt in PROMPTS]
        for _ in range(2):
            assert [ids for ids, _ in together(placed, kv_memory=3 * least(placed))[0]] == expected


def test_the_memory_plan_counts_states(model):
    assert "of states" in str(model.runner.memory)
    assert slots(model).size == 2 * 3 * 32 * 4 and model.program.window_bytes[STATE] == slots(model).size
    assert model.runner.shares(10, 1000)[1] * slots(model).size <= 5 * model.runner.unit


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
@pytest.mark.thin(2)
def test_published_numbers(name, backend):
    """Logits in chunks of 1, 7 and 64; greedy tokens alone, together, again behind a snapshot, and preempted."""
    folder = shared("fixtures_2026", name)
    case = json.loads((folder / "case.json").read_text())
    options = {"backend": backend, "activations": "f32"} | ({"block_size": 16} if backend == "reference" else {})
    with np.load(folder / "expected.npz") as expected:
        for chunk in (1, 7, 64):
            with numflow.load(folder, chunk=chunk, **options) as model:
                for at, prompt in enumerate(case["prompts"]):
                    wanted = expected[f"logits_{at}"]
                    assert np.abs(model.logits(prompt) - wanted).max() < 1e-4 * wanted.std()
    with numflow.load(folder, **options) as model:
        unit, size = model.runner.unit, model.program.block_size
        memory = (-(-80 // size) + -(-slots(model).size // unit)) * unit
    for engine in ({}, {"kv_memory": memory}, {"kv_memory": memory, "preemption": "recompute"}):
        with numflow.load(folder, **options) as model:
            for _ in range(2):
                found, _ = together(model, case["prompts"], settings={"max_tokens": 12}, **engine)
                assert [ids for ids, _ in found] == case["greedy"]
