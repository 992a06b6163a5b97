"""Adapters on checkpoints of all layouts: merged weights against sums computed here."""

from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from numflow import network
from numflow.errors import FormatError, RequestError
from numflow.formats.adapter import Adapter, LowRank
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.merge import merged
from numflow.network.adapters.steps import adaptable, parts_of
from numflow.network.adapters.tables import tied_table
from numflow.network.weights.source import WeightSource
from numflow.spec import load_spec
from tests.network.toy import CONFIG, checkpoint, shapes
from tests.specs.case import _batch, gguf_checkpoint, load_case, memory_checkpoint

PATH = Path("adapter")
RANK, FACTOR = 3, 0.5


def tensor(name: str, values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor(name, values.shape, TYPES["F32"], lambda: values.reshape(-1, values.shape[-1]).view(np.uint8))


def low_rank(name: str, shape: tuple[int, ...], magnitude: bool = False) -> LowRank:
    """A low-rank change of a matrix [..., N, K]."""
    rng, (*stack, n, k) = np.random.default_rng(len(name)), shape
    a, b = rng.standard_normal((*stack, RANK, k)), rng.standard_normal((*stack, n, RANK))
    return LowRank(tensor("a", a), tensor("b", b), FACTOR, tensor("m", 1 + rng.random(n)) if magnitude else None)


def own_matrices(found: Checkpoint) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes [..., N, K] of all matrices in products and look-ups of a network, and names of those stored as [..., K,
    N]."""
    built = network.build(network.choose_spec(found), found, fuse=False)
    used = {step.weights[role] for steps in built.entries.values() for step in steps for role in ("weight", "table")
            if role in step.weights and step.op in ("linear", "expert_linear", "head_linear", "embed")}
    parts = [part for name in used for part in built.weights[name].parts]
    turned = {part.tensor for part in parts if part.transpose}
    whole = {part.tensor: found.tensors[part.tensor].shape for part in parts}
    return {name: (*shape[:-2], shape[-1], shape[-2]) if name in turned else shape
            for name, shape in whole.items()}, turned


def by_hand(found: Checkpoint, adapter: Adapter, scale: float, turned: set[str]) -> Checkpoint:
    """The checkpoint with sums computed here."""
    tensors = dict(found.tensors)
    for name, change in adapter.added.items():
        a, b = (each.f32().astype(np.float64) for each in (change.a, change.b))
        added = scale * change.factor * np.einsum("...nr,...rk->...nk", b, a)
        old = found.tensors[name].f32()
        tensors[name] = tensor(name, old + (np.swapaxes(added, -1, -2) if name in turned else added))
    return replace(found, tensors=tensors)


CASES = ["llama_biased", "qwen2", "gpt2", "falcon_40b", "phi4_mini", "mixtral", "gpt_oss", "deepseek_v2", "bloom",
         "gemma3_multimodal", "bert", "t5", "qwen2_moe"]


@pytest.mark.parametrize("name, gguf", [*((name, False) for name in CASES), ("llama3_scaled", True), ("mixtral", True)])
@pytest.mark.thin(4)
def test_every_matrix_of_a_family(name, gguf):
    case = load_case(name)
    found = gguf_checkpoint(case) if gguf else memory_checkpoint(case.configs[0], case.tensors)
    spec = network.choose_spec(found)
    wanted, turned = own_matrices(found)
    built = network.build(spec, found, fuse=False)
    wanted.pop(tied_table(built), None)
    adapter = Adapter(PATH, found.naming, {name: low_rank(name, shape) for name, shape in wanted.items()})
    sums = by_hand(found, adapter, 0.7, turned)
    both = [WeightSource(network.build(spec, some), some)
            for some in (merged(found, spec, [(adapter, 0.7)]), sums)]
    assert [*both[0].network.weights] == [*both[1].network.weights] and wanted
    for weight in both[0].network.weights:
        ours, expected = (source.f32(weight) for source in both)
        assert np.allclose(ours, expected, atol=1e-5), weight
        if len(ours.shape) == 2:
            assert np.array_equal(both[0].raw(weight).f32(), ours)


def toy(tied: bool = False, **more):
    config = {**CONFIG, "tie_word_embeddings": tied, **more}
    wanted = shapes(config)
    if tied:
        del wanted["lm_head.weight"]
    found = checkpoint(config, wanted)
    return found, network.choose_spec(found)


Q = "model.layers.0.self_attn.q_proj.weight"


def test_several_adapters_and_scales_add_up():
    found, spec = toy()
    first, second = (Adapter(PATH, "hf", {Q: low_rank(name, (32, 32))}) for name in ("one", "another"))
    both = merged(found, spec, [(first, 2.0), (second, -1.0)]).tensors[Q].f32()
    once = by_hand(by_hand(found, first, 2.0, set()), second, -1.0, set()).tensors[Q].f32()
    assert np.allclose(both, once, atol=1e-5)


def test_rows_are_as_long_as_a_magnitude_says():
    found, spec = toy()
    change = low_rank(Q, (32, 32), magnitude=True)
    row = merged(found, spec, [(Adapter(PATH, "hf", {Q: change}), 0.5)]).tensors[Q].f32()
    plain = by_hand(found, Adapter(PATH, "hf", {Q: change}), 0.5, set()).tensors[Q].f32()
    assert np.allclose(np.linalg.norm(row, axis=1), change.magnitude.f32(), atol=1e-5)
    assert np.allclose(row / np.linalg.norm(row, axis=1, keepdims=True),
                       plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-5)


def test_columns_are_as_long_as_a_magnitude_says():
    (found, spec), name = toy(), "model.embed_tokens.weight"
    change = replace(low_rank(name, found.tensors[name].shape), by_column=True,
                     magnitude=tensor("m", np.linspace(1, 2, found.tensors[name].columns)))
    table = merged(found, spec, [(Adapter(PATH, "hf", {name: change}), 1.0)]).tensors[name].f32()
    assert np.allclose(np.linalg.norm(table, axis=0), np.linspace(1, 2, table.shape[1]), atol=1e-5)


def test_a_change_of_all_experts_is_cut_into_the_tensors_that_there_are():
    case = load_case("mixtral")
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec, rng = network.choose_spec(found), np.random.default_rng(3)
    at = "model.layers.1.block_sparse_moe.experts"
    n, k = found.tensors[f"{at}.0.w1.weight"].shape
    experts = sum(f"{at}.{expert}.w1.weight" in found.tensors for expert in range(99))

    def stack(n, k, experts=experts):
        return LowRank(tensor("a", rng.standard_normal((experts, RANK, k))),
                       tensor("b", rng.standard_normal((experts, n, RANK))), FACTOR)

    module = "model.layers.1.mlp.experts"  # as programs call it that keep all experts in one tensor
    changes = {f"{module}.gate_up_proj": stack(2 * n, k), f"{module}.down_proj": stack(k, n)}
    sums = merged(found, spec, [(Adapter(PATH, "hf", changes), 0.5)]).tensors
    for expert in range(experts):
        both, down = (change.factor * 0.5 * change.b.f32()[expert] @ change.a.f32()[expert]
                      for change in changes.values())
        for name, added in (("w1", both[:n]), ("w3", both[n:]), ("w2", down)):
            whole = f"{at}.{expert}.{name}.weight"
            assert np.allclose(sums[whole].f32(), found.tensors[whole].f32() + added, atol=1e-5)
    for count, words in ((experts + 1, "has fewer"), (experts - 1, "has more")):
        wrong = Adapter(PATH, "hf", {f"{module}.down_proj": stack(k, n, count)})
        with pytest.raises(FormatError, match=f"is for {count} experts, .* {words}"):
            fitted(wrong, found, spec)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_table_have_others_in_their_places(tied):
    (found, spec), name = toy(tied), "model.embed_tokens.weight"
    rows = np.random.default_rng(0).standard_normal((2, found.tensors[name].columns))
    adapter = Adapter(PATH, "hf", {}, tokens={name: ((3, 1), tensor("rows", rows))})
    some = merged(found, spec, [(adapter, 1.0)])
    wanted = found.tensors[name].f32()
    wanted[[3, 1]] = rows
    assert np.allclose(some.tensors[name].f32(), wanted, atol=1e-6)
    assert (tied_table(network.build(spec, some)) is not None) == tied  # the output matrix has them too
    with pytest.raises(FormatError, match="trainable_token_indices: 9999, but .* rows"):
        fitted(replace(adapter, tokens={name: ((3, 9999), tensor("rows", rows))}), found, spec)
    with pytest.raises(FormatError, match="changed twice"):
        fitted(replace(adapter, replaced={name: found.tensors[name]}), found, spec)


@pytest.mark.parametrize("stored, given", [("model.", ""), ("", "model."), ("model.", "model.")])
def test_prefixes_on_either_side(stored, given):
    found, _ = toy()
    tensors = {name.replace("model.", stored, 1): replace(one, name=name.replace("model.", stored, 1))
               for name, one in found.tensors.items()}
    found = replace(found, tensors=tensors)
    fit = fitted(Adapter(PATH, "hf", {Q.replace("model.", given, 1): low_rank(Q, (32, 32))}), found,
                 network.choose_spec(found))
    assert [*fit.adapter.added] == [Q.replace("model.", stored, 1)]


def logits_weight(found, spec):
    built = network.build(spec, found, fuse=False)
    step = next(step for step in built.entries["main"] if step.outputs == (built.outputs["logits"],))
    return WeightSource(built, found).f32(step.weights["weight"]), WeightSource(built, found).f32("token_embd.weight")


@pytest.mark.parametrize("target", ["model.embed_tokens.weight", "lm_head.weight"])
def test_table_and_head_part_where_one_is_changed(target):
    found, spec = toy(tied=True)
    change = low_rank("x", (40, 32))
    head, table = logits_weight(merged(found, spec, [(Adapter(PATH, "hf", {target: change}), 1.0)]), spec)
    base = found.tensors["model.embed_tokens.weight"].f32()
    added = base + FACTOR * change.b.f32() @ change.a.f32()
    assert np.allclose(table, added if "embed" in target else base, atol=1e-5)
    assert np.allclose(head, base if "embed" in target else added, atol=1e-5)
    new = np.ones((40, 32), np.float32)
    saved = Adapter(PATH, "hf", {}, replaced={target: tensor("n", new)})
    head, table = logits_weight(merged(found, spec, [(saved, 0.5)]), spec)
    assert np.array_equal(table if "embed" in target else head, new)
    assert np.array_equal(head if "embed" in target else table, base)
    if "embed" in target:
        together = Adapter(PATH, "hf", {target: change}, head_too=True)
        head, table = logits_weight(merged(found, spec, [(together, 1.0)]), spec)
        assert np.array_equal(head, table) and np.allclose(head, added, atol=1e-5)


def test_biases():
    found, spec = toy()
    adapter = Adapter(PATH, "hf", {Q: low_rank(Q, (32, 32))}, {Q: (tensor("v", np.ones(32)), 3.0)})
    once = merged(found, spec, [(adapter, 0.5)])
    twice = merged(found, spec, [(adapter, 0.5), (adapter, 1.0)])
    for some, value in ((once, 1.5), (twice, 4.5)):
        built = network.build(spec, some, fuse=False)
        assert (WeightSource(built, some).f32("blk.0.attn_q.bias") == value).all()
    replaced = Adapter(PATH, "hf", {}, replaced={Q.replace(".weight", ".bias"): tensor("v", np.full(32, 9.0))})
    some = merged(twice, spec, [(replaced, 0.1)])
    assert (WeightSource(network.build(spec, some), some).f32("blk.0.attn_q.bias") == 9).all()


def test_a_bias_of_logits_that_have_a_factor(tmp_path):
    (tmp_path / "scaled.toml").write_text('extends = "llama"\n[head]\nscale = 0.5\n', encoding="utf-8")
    head = "lm_head.weight"
    found, plain = toy()
    adapter = Adapter(PATH, "hf", {head: low_rank(head, (40, 32))}, {head: (tensor("v", np.ones(40)), 1.0)})
    merged(found, plain, [(adapter, 1.0)])
    with pytest.raises(FormatError, match="'lm_head.weight' gets a bias, but the model scales its logits"):
        merged(found, load_spec(tmp_path / "scaled.toml"), [(adapter, 1.0)])


@pytest.mark.parametrize("adapter, words", [
    (Adapter(PATH, "hf", {"model.layers.9.self_attn.q_proj.weight": low_rank("x", (32, 32))}), "layers.9"),
    (Adapter(PATH, "hf", {Q: low_rank("x", (32, 64))}), r"\[32, 64\]"),
    (Adapter(PATH, "hf", {Q: low_rank("x", (2, 32, 32))}), r"\[2, 32, 32\]"),
    (Adapter(PATH, "hf", {}, replaced={"lm_head.weight": tensor("x", np.ones((41, 32)))}), r"\[41, 32\]"),
    (Adapter(PATH, "hf", {}, replaced={"score.weight": tensor("x", np.ones((2, 32)))}), "score.weight"),
    (Adapter(PATH, "hf", {Q: low_rank("x", (32, 32))}, {Q: (tensor("v", np.ones(16)), 1.0)}), r"\[16\]"),
    (Adapter(PATH, "hf", {Q: low_rank("x", (32, 32))}, repeated={"lm_head.weight": tensor("x", np.ones((50, 32)))}),
     r"\[50, 32\]"),
    (Adapter(PATH, "hf", {Q: low_rank("x", (32, 32)), Q.removeprefix("model."): low_rank("x", (32, 32))}), "twice"),
    (Adapter(PATH, "gguf", {"blk.0.attn_q.weight": low_rank("x", (32, 32))}), "GGUF")])
def test_adapters_for_other_models(adapter, words):
    found, spec = toy()
    with pytest.raises(FormatError, match=words) as error:
        merged(found, spec, [(adapter, 1.0)])
    assert str(error.value).startswith("adapter: ") and "\n" not in str(error.value)


def test_an_adapter_for_another_architecture():
    found = gguf_checkpoint(load_case("llama3_scaled"))
    with pytest.raises(FormatError, match="'qwen2'"):
        merged(found, network.choose_spec(found), [(Adapter(PATH, "gguf", {}, architecture="qwen2"), 1.0)])


def logits_of(program, case, built, number: int) -> np.ndarray:
    given = case.inputs[0]
    batch = _batch(program, given["ids"], len(given["ids"]))
    batch.adapters = np.array([number], np.int32)
    return program.run(batch, output="logits" if "logits" in built.outputs else "hidden")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["llama_biased", "gpt2", "falcon_40b", "phi4_mini", "mixtral", "gpt_oss", "bloom",
                                  "qwen2_moe", "gemma3_multimodal"])
@pytest.mark.thin(6)
def test_rows_that_add_and_weights_that_are_sums(name, backend):
    case = load_case(name)
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec = network.choose_spec(found)
    plain = network.build(spec, found)
    wanted, _ = own_matrices(found)
    adapter = Adapter(PATH, "hf", {name: low_rank(name, shape) for name, shape in wanted.items()})
    some = merged(found, spec, [(adapter, 0.1)])
    whole = network.build(spec, some)
    built = adaptable(plain, found)
    with (closing(program_of(backend, whole, some)) as sums, closing(program_of(backend, plain, found)) as alone,
          closing(program_of(backend, built, found)) as program):
        program.set_adapter(2, parts_of(built, found, fitted(adapter, found, spec), 0.1))
        expected = logits_of(sums, case, whole, -1)
        assert np.abs(logits_of(program, case, built, 2) - expected).max() < 1e-4 * expected.std()
        bare = logits_of(alone, case, plain, -1)
        assert np.array_equal(logits_of(program, case, built, -1), bare)
        assert np.array_equal(logits_of(program, case, built, 1), bare)
        with pytest.raises(RequestError, match="adapter"):
            logits_of(program, case, built, 99)
        program.set_adapter(2, None)
        assert not np.array_equal(expected, bare)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["llama_biased", "gpt2"])
def test_rows_of_other_lengths_and_tensors_in_place(name, backend):
    """DoRA of every matrix, or replaced biases, table and matrix: applied per request they give what the merged model
    gives."""
    case = load_case(name)
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec, rng = network.choose_spec(found), np.random.default_rng(1)
    plain = network.build(spec, found)
    wanted, _ = own_matrices(found)
    tables = {name for name in wanted if any(word in name for word in ("embed", "wte", "wpe"))}
    dora = Adapter(PATH, "hf", {name: low_rank(name, shape, True) for name, shape in wanted.items()
                                if name not in tables and name != "lm_head.weight"})
    names = [*sorted(tables)[:1], min(set(wanted) - tables),
             *(name for name in found.tensors if name.endswith(("q_proj.bias", "c_attn.bias")))]
    saved = Adapter(PATH, "hf", {}, replaced={name: tensor(name, rng.standard_normal(found.tensors[name].shape))
                                              for name in names})
    built = adaptable(plain, found)
    with closing(program_of(backend, built, found)) as program:
        for number, (adapter, scale) in enumerate([(dora, 0.3), (saved, 1.0)]):
            some = merged(found, spec, [(adapter, scale)])
            program.set_adapter(number, parts_of(built, found, fitted(adapter, found, spec), scale))
            whole = network.build(spec, some)
            with closing(program_of("reference", whole, some)) as sums:
                expected = logits_of(sums, case, whole, -1)
            assert np.abs(logits_of(program, case, built, number) - expected).max() < 1e-4 * expected.std()


def program_of(backend: str, built, found):
    program = import_module(f"numflow.{backend}.program").Program(
        built, WeightSource(built, found), **({"activations": "f32", "threads": 2} if backend == "cpu" else {}))
    program.reserve(1, 1)
    return program


def test_what_rows_cannot_add():
    case = load_case("deepseek_v2")
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec = network.choose_spec(found)
    name = next(name for name in found.tensors if "kv_b_proj" in name)
    adapter = Adapter(PATH, "hf", {name: low_rank(name, found.tensors[name].shape)})
    built = adaptable(network.build(spec, found), found)
    with pytest.raises(RequestError, match="kv_b_proj.*merge"):
        parts_of(built, found, fitted(adapter, found, spec), 1.0)
    norm = next(name for name in found.tensors if "norm" in name)
    adapter = Adapter(PATH, "hf", {}, replaced={norm: found.tensors[norm]})
    with pytest.raises(RequestError, match="norm.*no product or look-up uses; merge"):
        parts_of(built, found, fitted(adapter, found, spec), 1.0)


@pytest.mark.parametrize("change", [
    lambda one: replace(one, a=tensor("a", np.full(one.a.shape, np.nan))),
    lambda one: replace(one, b=tensor("b", np.full(one.b.shape, -np.inf))),
    lambda one: replace(one, magnitude=tensor("m", np.full(one.magnitude.shape, np.inf))),
    lambda one: replace(one, factor=1e300),
    lambda one: replace(one, factor=3e38),
])
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite(change):
    name, found = "model.layers.0.mlp.up_proj.weight", checkpoint()
    spec = network.choose_spec(found)
    adapter = Adapter(PATH, "hf", {name: change(low_rank(name, (48, 32), magnitude=True))})
    built = network.build(spec, found)
    with pytest.raises(FormatError, match=rf"^adapter: '{name}': expected finite float32 numbers .*, found (nan|inf)$"):
        merged(found, spec, [(adapter, 1.0)]).tensors[name].f32()
    with pytest.raises(FormatError, match=rf"^adapter: '{name}': expected finite float32 numbers .*, found (nan|inf)$"):
        parts_of(built, found, fitted(adapter, found, spec), 1.0)
