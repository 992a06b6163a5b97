"""Models of other formats written as GGUF: read by numflow and, where it is at hand, by llama.cpp."""

import io
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from numflow import formats
from numflow.engine.quantise.export import export_gguf
from numflow.engine.quantise.quantize import quantize
from numflow.errors import RequestError, TokenizerError
from numflow.formats.gguf_writer import ENCODED
from numflow.quant.recipe import read_recipe
from numflow.spec import load_spec
from numflow.tokenizer.pieces import byte_of_character
from tests.conftest import shared
from tests.quant.small import TEXT, write_model
from tests.specs import toy
from tests.specs.case import load_case
from tests.specs.weights import values
from tests.tokenizer.conftest import train_sentencepiece


def export(source, target, kind="f32", **options):
    return export_gguf(formats.open_checkpoint(source), target, read_recipe(kind, ENCODED), **options)


def logits(path, ids):
    with numflow.load(path, backend="reference") as model:
        return model.logits(list(ids)), model.tokenizer.encode(TEXT[:200])


def error_of(found, expected):
    return float(np.abs(found - expected).max() / expected.std())


def same_numbers(source, target, most=1e-5):
    (expected, ids), (found, theirs) = logits(source, range(20)), logits(target, range(20))
    assert ids == theirs and error_of(found, expected) < most


def write_tokenizer(folder, size):
    """A byte-level BPE of printable ASCII that fills a vocabulary of any size from 110."""
    letter = {byte: text for text, byte in byte_of_character().items()}
    vocab = {text: id for id, text in enumerate([letter[10], *(letter[byte] for byte in range(32, 127))])}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), (letter[32], "the")]
    vocab |= {"".join(pair): len(vocab) + n for n, pair in enumerate(merges)}
    vocab |= {f"zz{id}": id for id in range(len(vocab), size - 1)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level, "added_tokens": [
            {"id": size - 1, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("hub") / "small")


@pytest.mark.parametrize(("kind", "most"), [("f32", 1e-5), ("bf16", 0.05), ("q8_0", 0.1), ("q4_0", 1.5)])
def test_a_folder(folder, tmp_path, kind, most):
    calls = []
    report = export(folder, tmp_path / "x.gguf", kind, written=lambda done, total: calls.append((done, total)))
    same_numbers(folder, tmp_path / "x.gguf", most)
    assert len(calls) == len(report["tensors"]) == 21 and calls == sorted(calls)
    kinds = {row["name"]: row["type"] for row in report["tensors"]}
    assert kinds["blk.1.ffn_down.weight"] == kind.upper() and kinds["blk.1.attn_norm.weight"] == "F32"
    config = formats.open_checkpoint(tmp_path / "x.gguf").config
    assert (config["general.architecture"], config["general.name"]) == ("llama", "small")


def test_files_of_our_own(folder, tmp_path):
    """Of a folder, and of a GGUF file, whose metadata is inside."""
    quantize(formats.open_checkpoint(folder), tmp_path / "a.safetensors", read_recipe("q4"))
    export(tmp_path / "a.safetensors", tmp_path / "a.gguf")
    same_numbers(tmp_path / "a.safetensors", tmp_path / "a.gguf")
    quantize(formats.open_checkpoint(tmp_path / "a.gguf"), tmp_path / "b.safetensors", read_recipe("q6"))
    export(tmp_path / "b.safetensors", tmp_path / "b.gguf")
    same_numbers(tmp_path / "b.safetensors", tmp_path / "b.gguf")
    before, after = (formats.open_checkpoint(tmp_path / name).config for name in ("a.gguf", "b.gguf"))
    assert before == after


@pytest.mark.parametrize("name", ["llama2", "bloomz_3b_pickle", "fusellm_7b", "gemma_2b", "mixtral_8x7b",
                                  "qwen1.5_0.5b"])
@pytest.mark.thin(2)
def test_published_logits_of_what_was_written(name, tmp_path):
    fixture, source = shared("fixtures", name), tmp_path / "model"
    shutil.copytree(fixture, source, copy_function=shutil.copyfile)
    source.chmod(0o755)
    write_tokenizer(source, json.loads((source / "config.json").read_text())["vocab_size"])
    export(source, tmp_path / "x.gguf")
    case, expected = json.loads((fixture / "case.json").read_text()), np.load(fixture / "expected.npz")
    with numflow.load(tmp_path / "x.gguf", backend="reference") as model:
        for n, prompt in enumerate(case["prompts"]):
            assert error_of(model.logits(prompt), expected[f"logits_{n}"]) < 1e-4


def test_an_encoder(tmp_path):
    case, source = load_case("minilm"), tmp_path / "model"
    (source / "1_Pooling").mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(case.configs[0]))
    save_file({name: values(name, shape).astype(np.float32) for name, shape in case.tensors.items()},
              source / "model.safetensors")
    (source / "modules.json").write_text(json.dumps([
        {"type": f"sentence_transformers.models.{name}", "path": path}
        for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"))]))
    write_tokenizer(source, case.configs[0]["vocab_size"])
    for mode, number in (("mean", 1), ("cls", 2), ("lasttoken", 3)):
        (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
        export(source, tmp_path / "x.gguf", replace=True)
        config = formats.open_checkpoint(tmp_path / "x.gguf").config
        assert (config["bert.pooling_type"], config["tokenizer.ggml.token_type_count"]) == (number, 2)
        assert config["bert.attention.causal"] is False
        found = []
        for path in (source, tmp_path / "x.gguf"):
            with numflow.load(path, backend="reference") as model:
                found.append(model.embed("the fox"))
        np.testing.assert_allclose(*found, atol=1e-5)
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    with pytest.raises(RequestError, match="embeddings are made by max, which a GGUF file cannot express"):
        export(source, tmp_path / "x.gguf", replace=True)
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    (source / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(RequestError, match="texts are lower-cased before they are embedded"):
        export(source, tmp_path / "x.gguf", replace=True)


def test_what_cannot_be_written(folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="no tokenizer: looked for .*; a GGUF file needs one"):
        export(bare, tmp_path / "x.gguf")
    shutil.copy(folder / "tokenizer.json", bare)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    with pytest.raises(RequestError, match="attention: window is 16, and would be read as 0"):
        export(bare, tmp_path / "x.gguf")
    (bare / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(RequestError, match="kind is gelu, and would be read as silu"):
        export(bare, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists() and not list(tmp_path.glob(".x*"))


def llama_cpp(program):
    found = shutil.which(program, path=os.environ.get("NUMFLOW_LLAMA_CPP"))
    if found is None:
        pytest.skip(f"no {program}; NUMFLOW_LLAMA_CPP names its folder")
    return found


def their_log_probabilities(path, folder, context=32):
    """Token ids [chunks, context], log-probabilities of the second half of each chunk as llama.cpp has them, and how
    far from these those of the file may be, which has 65536 steps for each row."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog, and then it walks home again. " * 9)
    size = str(context)
    done = subprocess.run([llama_cpp("llama-perplexity"), "-m", path, "-f", folder / "text.txt", "-c", size, "-b", size,
                           "--chunks", "2", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32",
                           "--save-all-logits", folder / "base"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    file = io.BytesIO((folder / "base").read_bytes())
    assert file.read(8) == b"_logits_"
    context, vocabulary, chunks = struct.unpack("<3i", file.read(12))
    ids = np.frombuffer(file.read(4 * context * chunks), np.int32).reshape(chunks, context)
    width, rows = 2 * ((vocabulary + 1) // 2) + 4, context - 1 - context // 2
    codes = np.frombuffer(file.read(), np.uint16).reshape(chunks, rows, width)
    scale = codes[:, :, :4].copy().view(np.float32)
    return ids, codes[:, :, 4:4 + vocabulary] * scale[:, :, :1] + scale[:, :, 1:], scale[:, :, :1] / 2


def their_ids(path, text, folder):
    (folder / "probe.txt").write_text(text)
    done = subprocess.run([llama_cpp("llama-tokenize"), "-m", path, "-f", folder / "probe.txt", "--ids",
                           "--log-disable"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def their_answer(path, prompt, tokens, *options):
    """llama.cpp's greedy answer, prompt and all. Of five runs the longest: on a small model llama-completion may end
    before its last words are written."""
    answers = []
    for _ in range(5):
        done = subprocess.run([llama_cpp("llama-completion"), "-m", path, "-p", prompt, "-n", str(tokens), "-no-cnv",
                               "--temp", "0", *options], capture_output=True, text=True, timeout=300,
                              stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr[-500:]
        answers.append(done.stdout.replace("[end of text]", "").strip())
    return max(answers, key=len)


def check_llama_cpp(source: Path, target: Path, folder: Path, most: float) -> None:
    """What llama.cpp makes of the target is what numflow makes of the source."""
    ids, found, steps = their_log_probabilities(target, folder)
    with numflow.load(source, backend="reference") as model:
        assert their_ids(target, TEXT[:300], folder) == model.tokenizer.encode(TEXT[:300])
        for chunk, theirs, step in zip(ids.copy(), found, steps, strict=True):
            chunk[0] = model.tokenizer.bos_id if model.tokenizer.add_bos else chunk[0]  # so llama-perplexity begins
            x = model.logits(chunk.tolist()).astype(np.float64)
            x -= x.max(-1, keepdims=True)
            total = np.log(np.exp(x).sum(-1, keepdims=True))
            x = np.maximum(x, -16)  # the file keeps no smaller ones
            expected = x - total
            assert (np.abs(theirs - expected[len(chunk) // 2:-1]) - 1.01 * step).max() < most * x.std()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [
    ("llama2", 1e-3), ("xverse_13b", 1e-3), ("mixtral_8x7b", 1e-3), ("gemma_2b", 0.01), ("falcon_40b", 0.01),
    ("bloomz_3b", 0.01), ("chatglm2_6b", 1e-3), ("deepseek_moe_16b", 1e-3), ("minicpm_2b", 1e-3), ("orion_14b", 1e-3),
    ("phi_2", 0.01), ("qwen1.5_0.5b", 1e-3), ("internlm_7b", 1e-3), ("yi_6b", 1e-3)])
def test_llama_cpp_agrees(name, most, tmp_path):
    """Where GELU is involved it computes with half precision."""
    source = tmp_path / "model"
    shutil.copytree(shared("fixtures", name), source, copy_function=shutil.copyfile)
    source.chmod(0o755)
    config = json.loads((source / "config.json").read_text())
    write_tokenizer(source, config.get("vocab_size") or config["padded_vocab_size"])
    export(source, tmp_path / "x.gguf")
    check_llama_cpp(source, tmp_path / "x.gguf", tmp_path, most)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internlm2", "olmoe", "qwen2"])
def test_llama_cpp_agrees_where_tables_are_tied(name, tmp_path, monkeypatch):
    """Of the first two it wants an output matrix of its own; as many key as query heads, as it expects of OLMoE."""
    monkeypatch.setattr(toy, "VOCABULARY", 130)
    spec, source = load_spec(name), tmp_path / "model"
    experts = 4 if spec.section("moe") else 0
    for key, value in {"window_size": 0, "kv_heads": 4, "experts": experts, "experts_per_token": experts // 2}.items():
        monkeypatch.setitem(toy.SIZES, key, value)
    made = toy.toy_checkpoint(spec, "hf", full=False)
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**made.config, "vocab_size": 130, "architectures": list(
        spec.section("detect")["architectures"])}))
    save_file({key: np.ascontiguousarray(tensor.f32()) for key, tensor in made.tensors.items()},
              source / "model.safetensors")
    write_tokenizer(source, 130)
    export(source, tmp_path / "x.gguf")
    assert ("output.weight" in formats.open_checkpoint(tmp_path / "x.gguf").tensors) == (name != "qwen2")
    check_llama_cpp(source, tmp_path / "x.gguf", tmp_path, 0.01)


def write_encoder_decoder(folder, name, seed, **changes):
    """A case of random weights that ends texts seldom. Its vocabulary has fewer tokens than the model has rows."""
    case, rng = load_case(name), np.random.default_rng(seed)
    config = case.configs[0] | changes
    tensors = {key: values(key, shape).astype(np.float32) for key, shape in case.tensors.items()}
    folder.mkdir()
    save_file({key: x if x.ndim == 1 else (3 * x.std() * rng.standard_normal(x.shape)).astype(np.float32)
               for key, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "spiece.model").write_bytes(train_sentencepiece(
        model_type="unigram", vocab_size=180, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [("t5", {}), ("flan_t5", {"relative_attention_max_distance": 128})])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_llama_cpp_agrees_on_an_encoder_decoder(name, changes, seed, tmp_path):
    """An answer may be empty: rows that no token belongs to have no text."""
    source, target = write_encoder_decoder(tmp_path / "model", name, seed, **changes), tmp_path / "x.gguf"
    export(source, target)
    with numflow.load(source, backend="reference") as ours, numflow.load(target, backend="reference") as read:
        for prompt in ("hello", "translate English to German: the house is small.", "The dog and the cat. " * 20):
            expected = ours.generate(prompt, max_tokens=20, temperature=0)
            assert read.generate(prompt, max_tokens=20, temperature=0).text == expected.text
            assert [*their_ids(target, prompt, tmp_path), 1] == ours.tokenizer.encode(prompt)  # it shows no </s>
            theirs = their_answer(target, prompt, 20, "-fa", "off", "-ctk", "f32", "-ctv", "f32")
            best = np.sort(ours.logits([0, *expected.ids], encoder_ids=ours.tokenizer.encode(prompt)))[:, -2:]
            sure = np.append(best[:, 1] - best[:, 0] > 1e-3 * best[:, 1].std(), False).argmin()  # tokens before a tie
            if sure < len(expected.ids):
                assert theirs.startswith(ours.tokenizer.decode(expected.ids[:sure]).strip())
            else:
                assert theirs == expected.text.strip()


@pytest.mark.slow
def test_llama_cpp_agrees_on_a_sentencepiece_vocabulary(tmp_path):
    for name, other in (("stories260K.v0.bin", "model.bin"), ("tok512.bin", "tokenizer.bin")):
        shutil.copyfile(shared("data", "llama2c", name), tmp_path / other)
    export(tmp_path / "model.bin", tmp_path / "x.gguf")
    check_llama_cpp(tmp_path / "model.bin", tmp_path / "x.gguf", tmp_path, 1e-3)
    prompt = "Once upon a time"
    with numflow.load(tmp_path / "model.bin", backend="reference") as model:
        expected = model.generate(prompt, max_tokens=40, temperature=0).text
    assert their_answer(tmp_path / "x.gguf", prompt, 40).startswith(prompt + expected)
