"""EAGLE-3 drafts: a draft checkpoint that reads a model's streams; values against the formula in NumPy."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.errors import RequestError, SpecError
from tests.engine.test_state import facts
from tests.specs.case import relative_error
from tests.specs.weights import values

WIDTH, WORDS, DRAFT_WORDS, HEADS, SIZE, FFN = 32, 90, 40, 4, 8, 48
CONFIG = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": FFN,
          "vocab_size": WORDS, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
MODEL = CONFIG | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6}
DRAFT = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_WORDS}
IDS = [7, 3, 11, 80, 5, 3, 11, 42, 9, 60, 3, 11]
GREEDY = {"max_tokens": 24, "ignore_eos": True, "logprobs": 0, "temperature": 0.0}


def layer(at, inputs=WIDTH):
    kv = 2 * SIZE
    return {at + "input_layernorm.weight": (WIDTH,), at + "post_attention_layernorm.weight": (WIDTH,),
            at + "self_attn.q_proj.weight": (WIDTH, inputs), at + "self_attn.k_proj.weight": (kv, inputs),
            at + "self_attn.v_proj.weight": (kv, inputs), at + "self_attn.o_proj.weight": (WIDTH, WIDTH),
            at + "mlp.gate_proj.weight": (FFN, WIDTH), at + "mlp.up_proj.weight": (FFN, WIDTH),
            at + "mlp.down_proj.weight": (WIDTH, FFN)}


def write(folder, config, shapes, more=()):
    folder.mkdir(exist_ok=True)
    tensors = {name: values(name, shape).astype(np.float32) for name, shape in shapes.items()} | dict(more)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def draft(folder, at="midlayer.", words=DRAFT_WORDS, drop=(), config=None, **more):
    """A draft's tensors; `drop`: those that it takes from the model."""
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), at + "hidden_norm.weight": (WIDTH,),
              "lm_head.weight": (words, WIDTH), "embed_tokens.weight": (WORDS, WIDTH), **layer(at, 2 * WIDTH)}
    ids = np.sort(np.random.default_rng(3).permutation(WORDS)[:words])
    own = {"d2t": (ids - np.arange(words)).astype(np.int64), "t2d": np.isin(np.arange(WORDS), ids)} if words < WORDS \
        else {}
    shapes = {name: shape for name, shape in shapes.items() if name not in drop}
    return write(folder, (config or DRAFT) | {"draft_vocab_size": words}, shapes, own | more), ids


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle") / "model"
    shapes = {"model.embed_tokens.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,),
              "lm_head.weight": (WORDS, WIDTH)}
    for at in range(6):
        shapes |= layer(f"model.layers.{at}.")
    write(folder, MODEL, shapes)
    return folder


def rms(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


def formula(tensors, at, hidden, ids, before_residual=False):
    """(hidden states, logits of the draft's words) of the draft at every position: [n, WIDTH], [n, words]."""
    token = rms(tensors["embed_tokens.weight"][ids], tensors[at + "input_layernorm.weight"])
    known = rms(hidden, tensors[at + "hidden_norm.weight"])
    both = np.concatenate([token, known], axis=1)
    q, k, v = ((both @ tensors[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(ids), -1, SIZE)
               for name in ("q", "k", "v"))
    angles = np.arange(len(ids))[:, None, None] * 10000.0 ** (-np.arange(SIZE // 2) * 2 / SIZE)

    def turned(x):
        a, b = x[..., :SIZE // 2], x[..., SIZE // 2:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    scores = np.einsum("ihd,jhd->hij", turned(q), np.repeat(turned(k), 2, axis=1)) / SIZE**0.5
    scores[:, np.triu(np.ones((len(ids), len(ids)), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    found = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), np.repeat(v, 2, axis=1))
    x = (known if before_residual else hidden) + found.reshape(len(ids), -1) @ tensors[at + "self_attn.o_proj.weight"].T
    h = rms(x, tensors[at + "post_attention_layernorm.weight"])
    gate, up = (h @ tensors[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[at + "mlp.down_proj.weight"].T
    return x, rms(x, tensors["norm.weight"]) @ tensors["lm_head.weight"].T


def drafted(model, streams, count):
    """Logits behind the first `count` tokens, and again behind a token that the draft took itself."""
    request = model.request(IDS, {"max_tokens": 4})
    drafter = model.core.drafters.make(request, request.sampler())
    drafter.observe(0, IDS[:1], streams)
    first = drafter._run_text(np.array(IDS[:count], np.int32))
    again = drafter._run([20])
    drafter.close()
    return first, again


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["words", "layers", "norms", "shared"])
@pytest.mark.thin(2)
def test_the_numbers_of_the_draft(tmp_path, model_folder, entering, backend, kind):
    """With words of its own; with other names and a list of layers; with norms before; with the model's words."""
    at, config, more, taps = "midlayer.", DRAFT, {}, [2, 3, 3]
    if kind == "layers":
        at, taps = "layers.0.", [2, 4, 6]
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
                  "transformer_layer_config": CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    elif kind == "norms":
        config = DRAFT | {"norm_before_residual": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}
        more, taps = {"input_norm.weight": np.linspace(0.5, 2, 3 * WIDTH, dtype=np.float32)}, [0, 2, 6]
    drop, words = (("embed_tokens.weight", "lm_head.weight"), WORDS) if kind == "shared" else ((), DRAFT_WORDS)
    tensors, ids = draft(tmp_path / "draft", at, words, drop, config, **more)
    with load(model_folder, backend=backend, activations="f32", draft=tmp_path / "draft") as model:
        model.logits(IDS)
        streams = model.program.result("streams")
        if kind == "shared":
            tensors |= {"embed_tokens.weight": values("model.embed_tokens.weight", (WORDS, WIDTH)).astype(np.float32),
                        "lm_head.weight": values("lm_head.weight", (WORDS, WIDTH)).astype(np.float32)}
        for own, tap in zip(np.split(streams, 3, axis=1), taps, strict=True):
            last = values("model.norm.weight", (WIDTH,)).astype(np.float32)
            found = rms(own, last) if tap == 6 else own
            np.testing.assert_allclose(found, entering["normed" if tap == 6 else tap], atol=2e-5)
        known = rms(streams, more["input_norm.weight"]) if kind == "norms" else streams
        hidden = known[:-1] @ tensors["fc.weight"].T
        for count in (2, len(IDS)):
            x, logits = formula(tensors, at, hidden[:count - 1], IDS[1:count], kind == "norms")
            _, next_logits = formula(tensors, at, np.concatenate([hidden[:count - 1], x[-1:]]), [*IDS[1:count], 20],
                                     kind == "norms")
            for found, wanted in zip(drafted(model, streams, count), (logits[-1], next_logits[-1]), strict=True):
                assert relative_error(found[ids], wanted) < 1e-4
                assert words == WORDS or np.isneginf(np.delete(found, ids)).all()


@pytest.fixture(scope="module")
def entering(model_folder):
    """By layer the stream that enters it [n, WIDTH]; behind the last one what its norm makes of it."""
    found = {}
    with load(model_folder, backend="reference") as model:
        def observe(step, inputs):
            if step.label.endswith("attn_norm"):
                found[int(step.label.split(".")[1])] = np.array(inputs[0])

        model.program.observer = observe
        found["normed"] = model.hidden(IDS)
    return found


@pytest.mark.parametrize("words", [DRAFT_WORDS, WORDS])
@pytest.mark.merge
def test_drafts_change_no_bit(tmp_path, model_folder, words):
    draft(tmp_path, words=words)
    prompts = [IDS, IDS[3:], IDS * 3, IDS[::-1]]
    with load(model_folder, activations="f32") as model:
        alone = [facts(model.generate(prompt, **GREEDY)) for prompt in prompts]
    with load(model_folder, activations="f32", draft=tmp_path, chunk=5) as model:
        assert [facts(model.generate(prompt, **GREEDY)) for prompt in prompts] == alone
        with Engine(model, max_step_tokens=9) as engine:
            for _ in range(2):
                handles = [engine.submit(prompt, draft_tokens=3, **GREEDY) for prompt in prompts]
                assert [facts(handle.result()) for handle in handles] == alone
            assert engine.stats["drafts"] > 100
            sampled = engine.submit(IDS, n=3, seed=5, temperature=1.0, max_tokens=8, draft_tokens=2)
            assert all(set(one.ids) <= set(range(WORDS)) for one in sampled.results())


def test_drafts_that_do_not_fit_are_told(tmp_path, model_folder):
    draft(tmp_path)
    with pytest.raises(SpecError, match=r"EAGLE-3 drafts for another model and runs beside that one: load the model wit"
                                        r"h draft="):
        load(tmp_path)
    with pytest.raises(RequestError, match="on one device: leave out devices"):
        load(model_folder, draft=tmp_path, devices="0;1")
    for words, wrong in (([90] * DRAFT_WORDS, "token id 90 is not in the model's range"),
                         ([-at for at in range(DRAFT_WORDS)], "two tokens of the draft are the same token"),
                         ([0] * 9, r"is I64 \[9\], expected I64 \[40\]")):
        draft(tmp_path, d2t=np.array(words, np.int64))
        with pytest.raises(SpecError, match=wrong):
            load(model_folder, draft=tmp_path)
    draft(tmp_path, config=DRAFT | {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]})
    with pytest.raises(SpecError, match=r"reads the stream of layer 7: expected 0 .. 6"):
        load(model_folder, draft=tmp_path)
