"""Models written as GGUF: read by the gguf package, by numflow and, where it is at hand, by llama.cpp."""

import os
import shutil
import subprocess

import gguf
import numpy as np
import pytest

import numflow
from numflow import formats
from numflow.engine.quantise.export import export_gguf
from numflow.errors import FormatError, RequestError
from numflow.formats import gguf_writer
from numflow.formats.gguf_writer import ENCODED
from numflow.formats.types import to_f32
from numflow.quant.recipe import Recipe, read_recipe
from tests.conftest import real_model
from tests.quant.small import TEXT

WIDTH, FFN, VOCABULARY = 64, 96, 258


def write_gguf(path, change=None, width=WIDTH, ffn=FFN, rope=16, **more):
    """A small decoder of random weights in float32. more: further u32 pairs, __ for a full stop."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, width), "output_norm": (width,), "output": (VOCABULARY, width)}
    for layer in range(2):
        at = f"blk.{layer}."
        shapes |= {f"{at}attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
        shapes |= {f"{at}ffn_gate": (ffn, width), f"{at}ffn_up": (ffn, width), f"{at}ffn_down": (width, ffn),
                   f"{at}attn_norm": (width,), f"{at}ffn_norm": (width,)}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"context_length": 128, "embedding_length": width, "block_count": 2, "feed_forward_length": ffn,
                       "attention.head_count": 4, "attention.head_count_kv": 4, "rope.dimension_count": rope}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("general.file_type", 0)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.data_alignment = more.get("general__alignment", 32)
    letters = [chr(c) if 33 <= c < 127 else chr(256 + c) for c in range(256)]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [*letters, "ab", "<s>"])
    writer.add_array("tokenizer.ggml.token_type", [1] * 257 + [3])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 257)
    tensors = {f"{name}.weight": (0.1 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
               for name, shape in shapes.items()}
    if change:
        change(tensors)
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("source") / "small.gguf")


def fields(path):
    """Key -> (type, value) of the metadata, as the gguf package reads it."""
    return {key: (field.types, field.contents()) for key, field in gguf.GGUFReader(path).fields.items()
            if not key.startswith("GGUF.")}


@pytest.mark.parametrize("name", sorted(set(ENCODED.values()) - {"F32"}))
@pytest.mark.thin(2)
def test_each_type(source, tmp_path, name):
    target, checkpoint = tmp_path / "x.gguf", formats.open_checkpoint(source)
    report = export_gguf(checkpoint, target, read_recipe(name.lower(), ENCODED))
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    assert list(theirs) == list(checkpoint.tensors)
    for row in report["tensors"]:
        tensor, x = theirs[row["name"]], checkpoint.tensors[row["name"]].f32()
        assert tensor.tensor_type.name == row["type"] == (name if x.ndim == 2 else "F32")
        y = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(x.shape)
        if x.ndim == 2:
            error = np.linalg.norm(y - x) / np.linalg.norm(x)
            assert error == pytest.approx(row["error"], rel=1e-4, abs=1e-9) and error < 0.11
        else:
            np.testing.assert_array_equal(y, x)
    with numflow.load(target, backend="reference") as a, numflow.load(source, backend="reference") as b:
        found, expected = a.logits(list(TEXT[:20].encode())), b.logits(list(TEXT[:20].encode()))
        assert a.tokenizer.encode("abc") == b.tokenizer.encode("abc")
    assert np.linalg.norm(found - expected) < 0.3 * np.linalg.norm(expected)


def test_metadata_is_copied(source, tmp_path):
    other = write_gguf(tmp_path / "y.gguf", split__no=0, general__alignment=64)
    export_gguf(formats.open_checkpoint(other), tmp_path / "x.gguf", read_recipe("q8_0", ENCODED))
    before, after = fields(other), fields(tmp_path / "x.gguf")
    gone = {"split.no", "general.file_type"}  # which are about other tensors
    assert {key: value for key, value in before.items() if key not in gone} == {
        key: value for key, value in after.items() if key != "general.quantization_version"}
    assert after["general.quantization_version"][1] == 2
    assert all(tensor.data_offset % 64 == 0 for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors)


def test_a_recipe_of_types_and_what_stays(source, tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('weights = "q4_0"\n[tensors]\n"token_embd" = "Q8_0"\n"*attn_v*" = "keep"\n')
    report = export_gguf(formats.open_checkpoint(source), tmp_path / "x.gguf", read_recipe(file, ENCODED))
    types = {row["name"]: row["type"] for row in report["tensors"]}
    assert (types["token_embd.weight"], types["blk.1.attn_v.weight"], types["output.weight"]) == ("Q8_0", "F32", "Q4_0")
    assert report["bits_per_weight"] == pytest.approx(8 * sum(
        row["bytes"] for row in report["tensors"] if row["type"] != "F32") / report["weights"], abs=1e-6)
    file.write_text('weights = "q3h"\n')
    with pytest.raises(RequestError, match="weights: no GGUF type 'q3h' that can be written"):
        read_recipe(file, ENCODED)
    with pytest.raises(RequestError, match="no GGUF type that can be written or recipe file 'q4_k'"):
        read_recipe("q4_k", ENCODED)


def test_what_cannot_be_written(source, tmp_path):
    q8 = read_recipe("q8_0", ENCODED)
    with pytest.raises(RequestError, match="quantises nothing"):
        export_gguf(formats.open_checkpoint(source), tmp_path / "x.gguf", Recipe("none", "keep"))
    (tmp_path / "there.gguf").write_bytes(b"something")
    with pytest.raises(RequestError, match="is there already"):
        export_gguf(formats.open_checkpoint(source), tmp_path / "there.gguf", q8)
    for value, name, error, message in ((np.nan, "Q8_0", FormatError, "row 3, column 5 is nan"),
                                        (1e6, "F16", RequestError, "up to 1e.06, which F16 cannot hold")):
        def spoil(tensors, value=value):
            tensors["output.weight"][3, 5] = value

        bad = write_gguf(tmp_path / "bad.gguf", spoil)
        with pytest.raises(error, match=message):
            export_gguf(formats.open_checkpoint(bad), tmp_path / "x.gguf", read_recipe(name, ENCODED))
    assert not (tmp_path / "x.gguf").exists() and not list(tmp_path.glob(".x*"))


def test_rows_are_encoded_in_parts(monkeypatch):
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    whole = gguf_writer.encode(x, "Q5_1")
    monkeypatch.setattr(gguf_writer, "_PART", 7 * 64)
    np.testing.assert_array_equal(gguf_writer.encode(x, "Q5_1"), whole)
    assert np.abs(to_f32(whole, "Q5_1") - x).max() < 0.15


@pytest.mark.slow
def test_llama_cpp_reads_it(tmp_path):
    folder = os.environ.get("NUMFLOW_LLAMA_CPP")
    program = shutil.which("llama-perplexity", path=folder) if folder else shutil.which("llama-perplexity")
    if program is None:
        pytest.skip("no llama-perplexity; NUMFLOW_LLAMA_CPP names its folder")
    target, text = tmp_path / "x.gguf", tmp_path / "text.txt"
    source = real_model("SmolLM2-135M-Instruct.Q4_1.gguf")
    export_gguf(formats.open_checkpoint(source), target, Recipe("mix", "Q8_0", (("*ffn_down", "Q4_1"),)))
    text.write_text("The quick brown fox jumps over the lazy dog, and then it walks home again. " * 40)
    found = []
    for model in (source, target):
        run = subprocess.run([program, "-m", model, "-f", text, "-c", "128", "--chunks", "2", "-t", "2"],
                             capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-500:]
        found.append(float(run.stdout.split("PPL = ")[-1].split()[0]))
    assert found[1] == pytest.approx(found[0], rel=0.02)
