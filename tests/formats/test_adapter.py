"""Adapters read from PEFT and GGUF files, and refused files."""

import json
import struct

import numpy as np
import pytest

from numflow.errors import FormatError, ModelNotFoundError, NumflowError
from numflow.formats.adapter import open_adapter
from tests.formats.make import damaged, entry, gguf, pair, text, u32
from tests.formats.peft import PREFIX, write_adapter
from tests.formats.peft import pair as matrices

NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("config, factor", [
    ({}, 2.0), ({"use_rslora": True}, 4.0), ({"lora_alpha": 3}, 0.75), ({"alpha_pattern": {"q_proj": 2}}, 0.5),
    ({"alpha_pattern": {"k_proj": 2}}, 2.0), ({"alpha_pattern": {r"layers\.\d+\.self_attn\..*": 1}}, 0.25),
    ({"alpha_pattern": {"elf_attn.q_proj": 2}}, 2.0), ({"r": 64, "rank_pattern": {"0.self_attn.q_proj": 4}}, 2.0),
    ({"alpha_pattern": {"q_proj": 16, "self_attn.q_proj": 2}}, 4.0)])
def test_the_factor_of_a_module(tmp_path, config, factor):
    made = matrices(NAME, (6, 5))
    adapter = open_adapter(write_adapter(tmp_path, made, **config))
    change = adapter.added[f"{NAME}.weight"]
    assert change.factor == pytest.approx(factor) and change.shape == (6, 5) and change.rank == 4
    a, b = change.matrices()
    assert (a == made[f"{PREFIX}{NAME}.lora_A.weight"]).all() and (b == made[f"{PREFIX}{NAME}.lora_B.weight"]).all()


def test_embeddings_biases_saved_modules_and_copies(tmp_path):
    made = matrices("model.embed_tokens", (3, 7), kind="lora_embedding_{}")
    made |= {f"{PREFIX}lm_head.weight": np.ones((7, 3), np.float32),
             f"{PREFIX}model.embed_tokens.base_layer.weight": np.zeros((7, 3), np.float32),
             **matrices(NAME, (6, 5)), f"{PREFIX}{NAME}.lora_B.bias": np.ones(6, np.float32),
             f"{PREFIX}{NAME}.lora_magnitude_vector": np.ones(6, np.float32)}
    adapter = open_adapter(write_adapter(tmp_path, made) / "adapter_model.safetensors")
    table = adapter.added["model.embed_tokens.weight"]
    a, b = table.matrices()
    expected = made[f"{PREFIX}model.embed_tokens.lora_embedding_B"] @ made[
        f"{PREFIX}model.embed_tokens.lora_embedding_A"]
    assert table.shape == (7, 3) and np.allclose(b @ a, expected.T)
    assert [*adapter.replaced] == ["lm_head.weight"] and [*adapter.repeated] == ["model.embed_tokens.weight"]
    (vector, factor), = adapter.offsets.values()
    assert vector.shape == (6,) and factor == 2.0 and adapter.added[f"{NAME}.weight"].magnitude.shape == (6,)


def test_rows_of_a_table_trained_biases_and_lengths_of_columns(tmp_path):
    table = "model.embed_tokens"
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = {f"{PREFIX}{table}.token_adapter.trainable_tokens_delta": rows,
            f"{PREFIX}{NAME}.base_layer.bias": np.ones(6, np.float32), **matrices(NAME, (6, 5))}
    for said in ([5, 2], {"embed_tokens": [5, 2], "lm_head": [1]}):
        adapter = open_adapter(write_adapter(tmp_path, made, bias="lora_only", trainable_token_indices=said))
        (numbers, tensor), = adapter.tokens.values()
        assert [*adapter.tokens] == [f"{table}.weight"] and numbers == (5, 2) and (tensor.f32() == rows).all()
        assert [*adapter.replaced] == [f"{NAME}.bias"] and not adapter.repeated
    for said in ([5], [5, -1], {"lm_head": [5, 2]}, [5, True], "all"):
        with pytest.raises(FormatError, match="trainable_token_indices of .*expected 2 numbers"):
            open_adapter(write_adapter(tmp_path, made, trainable_token_indices=said))
    assert not open_adapter(write_adapter(tmp_path, made, trainable_token_indices=[5, 2])).replaced
    made = matrices(table, (3, 7), kind="lora_embedding_{}") | {
        f"{PREFIX}{table}.lora_magnitude_vector": np.ones(3, np.float32)}
    assert open_adapter(write_adapter(tmp_path, made, use_dora=True)).added[f"{table}.weight"].by_column


def test_parameters_with_all_experts(tmp_path):
    """A has r rows per expert; B has r columns, each with all experts; the innermost of nested pairs is declared first.
    """
    module, rng = "model.layers.1.mlp.experts", np.random.default_rng(2)
    sizes = {f"{module}.base_layer.lora_A": (3 * 5, 7), f"{module}.base_layer.lora_B": (12, 3 * 5),
             f"{module}.lora_A": (3 * 4, 6), f"{module}.lora_B": (7, 3 * 4)}
    made = {f"{PREFIX}{name}.weight": rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    made |= matrices(NAME, (6, 5))
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight"]
    config = {"rank_pattern": {".*gate_up_proj": 5}, "alpha_pattern": {"experts.down_proj": 2, "q_proj": 100}}
    added = open_adapter(write_adapter(tmp_path, made, target_parameters=targets, **config)).added
    assert {name: change.factor for name, change in added.items()} == {
        f"{module}.gate_up_proj": 8 / 5, f"{module}.down_proj": 0.5, f"{NAME}.weight": 2.0}
    for name, inner, rank in (("gate_up_proj", ".base_layer", 5), ("down_proj", "", 4)):
        stored_a, stored_b = (made[f"{PREFIX}{module}{inner}.lora_{letter}.weight"] for letter in "AB")
        a, b = added[f"{module}.{name}"].matrices()
        for expert in range(3):
            expected = sum(np.outer(stored_b[:, r * 3 + expert], stored_a[expert * rank + r]) for r in range(rank))
            assert np.allclose(b[expert] @ a[expert], expected, atol=1e-5)
    short = open_adapter(write_adapter(tmp_path, made, target_parameters=["gate_up_proj", "down_proj"], **config)).added
    assert short.keys() == added.keys()
    for broken, words in [(["experts.down_proj"], "which of experts.down_proj the 2 pairs"), ("experts", "names"),
                          (["experts.first", "experts.last"], "which of"), ([], "which of none")]:
        with pytest.raises(FormatError, match=words):
            open_adapter(write_adapter(tmp_path, made, target_parameters=broken, **config))
    with pytest.raises(FormatError, match="A and B alone, found .*bias"):
        open_adapter(write_adapter(tmp_path, made | {f"{PREFIX}{module}.lora_B.bias": np.ones(7, np.float32)},
                                   target_parameters=targets, **config))


@pytest.mark.parametrize("config, words", [
    ({"peft_type": "IA3"}, "IA3"), ({"peft_type": None}, "peft_type"), ({"lora_alpha": "much"}, "lora_alpha"),
    ({"r": 8}, "rank 4"), ({"rank_pattern": {"q_proj": 2}}, "rank 4"), ({"alpha_pattern": [1]}, "alpha_pattern"),
    ({"alpha_pattern": {"(": 1}}, "regular expression"), ({"alpha_pattern": {"(a+)+x": 1}}, "too long"),
    ({"alpha_pattern": {".*a.*b.*c.*d.*": 1}}, "too long"), ({"use_dora": True}, "use_dora"),
    ({"init_lora_weights": "pissa"}, "pissa"), ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"), ({"lora_alpha": float("inf")}, "lora_alpha"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"use_rslora": "false"}, "use_rslora: expected true or false, found 'false'"), ({"use_dora": [0]}, "use_dora: e"),
    ({"ensure_weight_tying": 1}, "ensure_weight_tying: exp"), ({"bias": True}, "bias: expected 'none', 'all' or")])
def test_configurations_that_are_refused(tmp_path, config, words):
    with pytest.raises(FormatError, match=words) as error:
        open_adapter(write_adapter(tmp_path, matrices(NAME, (6, 5)), **config))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_are_refused(tmp_path):
    good = matrices(NAME, (6, 5))
    a, b = good
    for broken, words in [({a: good[a]}, "B of the pair"), ({b: good[b]}, "A of the pair"), ({}, "without tensors"),
                          ({a: good[a], b: good[b][:, :3]}, "rank 4"), ({a: good[a][0], b: good[b]}, r"\[r, K\]"),
                          (good | {f"{PREFIX}{NAME}.lora_E": good[a]}, "lora_E"),
                          (good | {f"{PREFIX}{NAME}.lora_magnitude_vector": np.ones(5, np.float32)}, "6 numbers"),
                          (good | {f"{PREFIX}{NAME}.lora_A.default.weight": good[a]}, "two of"),
                          (good | {a: good[a].astype(np.int32)}, "floating-point numbers, but .*lora_A.weight' is I32"),
                          (good | {b: good[b].astype(bool)}, "floating-point numbers, but .*lora_B.weight' is BOOL"),
                          (good | {f"{PREFIX}{NAME}.lora_magnitude_vector": np.ones(6, np.uint8)}, "vector' is U8"),
                          (good | {f"{PREFIX}{NAME}.lora_B.bias": np.ones(6, np.int64)}, "bias' is I64")]:
        with pytest.raises(FormatError, match=words):
            open_adapter(write_adapter(tmp_path, broken))


def test_what_is_no_adapter(tmp_path):
    for place, words in [(tmp_path / "none", "no such file"), (tmp_path, "no adapter")]:
        with pytest.raises(ModelNotFoundError, match=words):
            open_adapter(place)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match="peft_type"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelNotFoundError, match="adapter_model"):
        open_adapter(tmp_path)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def gguf_file(alpha: float = 4.0, kind: str = "adapter", names=("blk.0.attn_q.weight.lora_a",
                                                                "blk.0.attn_q.weight.lora_b"), more=()) -> bytes:
    """A GGUF adapter of rank 2, for a matrix [3, 4]."""
    pairs = [pair("general.type", 8, text(kind)), pair("adapter.type", 8, text("lora")),
             pair("general.architecture", 8, text("llama")), pair("adapter.lora.alpha", 6, struct.pack("<f", alpha)),
             *more]
    return gguf(pairs, [entry(names[0], [4, 2], 0, 0), entry(names[1], [2, 3], 0, 32)],
                floats(*range(8)) + floats(*range(6)))


def test_gguf(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_file())
    for place in (path, tmp_path):
        adapter = open_adapter(place)
        change = adapter.added["blk.0.attn_q.weight"]
        assert adapter.naming == "gguf" and adapter.architecture == "llama"
        assert change.shape == (3, 4) and change.factor == 2.0
        assert change.matrices()[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    path.write_bytes(gguf_file(names=("token_embd.weight.lora_a", "token_embd.weight.lora_b")))
    with pytest.raises(FormatError, match="rank"):  # of a table both have the rank last
        open_adapter(path)
    pairs = [pair("general.type", 8, text("adapter")), pair("adapter.type", 8, text("lora")),
             pair("adapter.lora.alpha", 6, struct.pack("<f", 4))]
    sizes = {"a.weight": 1, "b.weight": 2, "token_embd.weight": 4}  # ranks
    entries = [entry(f"{name}.lora_{half}", [rank, 5] if half == "b" or name[0] == "t" else [5, rank], 0, 96 * n + at)
               for n, (name, rank) in enumerate(sizes.items()) for half, at in (("a", 0), ("b", 1000 * 32))]
    path.write_bytes(gguf(pairs, entries, bytes(40000)))
    assert {name: (one.rank, one.factor, one.shape) for name, one in open_adapter(path).added.items()} == {
        name: (rank, 4 / rank, (5, 5)) for name, rank in sizes.items()}


def test_a_norm_in_a_gguf_file_takes_the_place_of_the_bases(tmp_path):
    """Adapters extracted by mergekit contain norms."""
    path, data = tmp_path / "a.gguf", floats(*range(8)) + floats(*range(8))
    pairs = [pair("general.type", 8, text("adapter")), pair("adapter.type", 8, text("lora")),
             pair("adapter.lora.alpha", 6, struct.pack("<f", 4))]
    path.write_bytes(gguf(pairs, [entry("blk.0.attn_norm.weight", [8], 0, 32)], data))
    assert open_adapter(path).replaced["blk.0.attn_norm.weight"].f32().tolist() == list(range(8))
    path.write_bytes(gguf(pairs, [entry("blk.0.attn_norm.weight", [4, 2], 0, 32)], data))
    with pytest.raises(FormatError, match="a vector whose name ends in _norm"):
        open_adapter(path)


def test_gguf_with_invocation_tokens(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_file(more=[pair("adapter.alora.invocation_tokens", 9, struct.pack("<IQ2I", 4, 2, 7, 9))]))
    assert open_adapter(path).invocation == (7, 9)


@pytest.mark.parametrize("broken, words", [
    (gguf_file(kind="model"), "no LoRA"), (gguf_file(float("nan")), "alpha"), (gguf([u32("a", 1)]), "no LoRA"),
    (gguf_file(names=("blk.0.attn_q.weight.lora_a", "blk.1.attn_q.weight.lora_b")), "is missing"),
    (gguf_file(more=[pair("adapter.alora.invocation_tokens", 9, struct.pack("<IQf", 6, 1, 7))]),
     "invocation_tokens: expected token ids"),
    (gguf_file(names=("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight")), "ends in")])
def test_gguf_files_that_are_refused(tmp_path, broken, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(broken)
    with pytest.raises(FormatError, match=words):
        open_adapter(path)


def test_a_damaged_file_is_refused_or_read(tmp_path):
    folder = write_adapter(tmp_path / "peft", matrices(NAME, (3, 2), rank=1), r=1)
    files = [(folder / "adapter_config.json", folder), (folder / "adapter_model.safetensors", folder)]
    (tmp_path / "a.gguf").write_bytes(gguf_file())
    read = 0
    for path, place in [*files, (tmp_path / "a.gguf", tmp_path / "a.gguf")]:
        whole = path.read_bytes()
        for data in [*[whole[:end] for end in range(0, len(whole), 7)], *list(damaged(whole))[::11]]:
            path.write_bytes(data)
            try:
                for change in open_adapter(place).added.values():
                    read += len(change.matrices())
            except NumflowError as error:
                assert "\n" not in str(error)
        path.write_bytes(whole)
    assert read > 50


def test_a_router_beside_targets_that_name_no_module(tmp_path):
    module = "model.layers.0.mlp.gate"
    made = matrices(module, (6, 5), rank=5)
    config = {"target_parameters": ["down_proj", "gate.weight", "gate_up_proj"], "rank_pattern": {"weight": 5}}
    added = open_adapter(write_adapter(tmp_path, made, **config)).added
    assert {name: change.shape for name, change in added.items()} == {f"{module}.weight": (6, 5)}


def test_a_table_and_its_output_matrix_stay_one_only_for_targets_of_these_names(tmp_path):
    table = matrices("model.embed_tokens", (6, 5), kind="lora_embedding_{}")
    for targets, tied in ((["embed_tokens"], True), (["wte"], False), (["model.embed_tokens", "q_proj"], True),
                          (r".*\.(q_proj|embed_tokens)", False), ("(?:.*q|^embed_tokens$)", True), ("x{1,", False),
                          (None, False)):
        if targets == "x{1,":
            table = matrices(NAME, (6, 5))  # nobody asks what such targets are where there is no table
        folder = write_adapter(tmp_path, table, target_modules=targets, ensure_weight_tying=True)
        assert open_adapter(folder).head_too == tied, targets


def test_trained_biases_of_wrapped_modules(tmp_path):
    bias = np.ones(6, np.float32)
    made = matrices(NAME, (6, 5)) | {f"{PREFIX}decoder.token_adapter.base_layer.bias": bias,
                                     f"{PREFIX}score.original_module.dense.bias": bias}
    adapter = open_adapter(write_adapter(tmp_path, made, bias="lora_only"))
    assert [*adapter.replaced] == ["decoder.bias"]


def test_a_pair_of_a_convolution(tmp_path):
    made = {f"{PREFIX}patch.lora_A.weight": np.arange(48, dtype=np.float32).reshape(4, 3, 2, 2),
            f"{PREFIX}patch.lora_B.weight": np.ones((6, 4, 1, 1), np.float32)}
    a, b = open_adapter(write_adapter(tmp_path, made)).added["patch.weight"].matrices()
    assert a.shape == (4, 12) and b.shape == (6, 4) and np.array_equal(a.reshape(-1), np.arange(48))
