"""Adapters read from files: PEFT's and GGUF's, and what is refused."""

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


@pytest.mark.parametrize("config, words", [
    ({"peft_type": "IA3"}, "IA3"), ({"peft_type": None}, "peft_type"), ({"lora_alpha": "much"}, "lora_alpha"),
    ({"r": 8}, "rank 4"), ({"rank_pattern": {"q_proj": 2}}, "rank 4"), ({"alpha_pattern": [1]}, "alpha_pattern"),
    ({"alpha_pattern": {"(": 1}}, "regular expression"), ({"alpha_pattern": {"(a+)+x": 1}}, "too long"),
    ({"alpha_pattern": {".*a.*b.*c.*d.*": 1}}, "too long"), ({"use_dora": True}, "use_dora"),
    ({"init_lora_weights": "pissa"}, "pissa"), ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"), ({"lora_alpha": float("inf")}, "lora_alpha"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices")])
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
                          (good | {f"{PREFIX}{NAME}.lora_A.default.weight": good[a]}, "two of")]:
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
    """Rank 2, for a matrix [3, 4]."""
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


@pytest.mark.parametrize("broken, words", [
    (gguf_file(kind="model"), "no LoRA"), (gguf_file(float("nan")), "alpha"), (gguf([u32("a", 1)]), "no LoRA"),
    (gguf_file(names=("blk.0.attn_q.weight.lora_a", "blk.1.attn_q.weight.lora_b")), "is missing"),
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
