"""`open_checkpoint`: which file of a folder is the model, its format, and the files next to it."""

import json
import os

import numpy as np
import pytest

from numflow.errors import FormatError, ModelNotFoundError
from numflow.formats import detect, open_checkpoint
from tests.conftest import real_model, shared
from tests.formats import make
from tests.formats.test_llama2c import model, version_1

SAFETENSORS = make.safetensors({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
                               make.values(2).tobytes())
GGUF = make.gguf(entries=[make.entry("w", [2], 0, 0)], data=make.values(2).tobytes())
VALUE = make.dictionary({"w": make.tensor(make.stored("0", 2), [2], [1])})
ZIP = make.torch_zip(VALUE, {"0": make.values(2).tobytes()})
LEGACY = make.torch_legacy(VALUE, ["0"], [(2, make.values(2).tobytes())])
LLAMA2C = version_1(model(False))


@pytest.mark.parametrize(("made", "kind", "naming"), [
    (SAFETENSORS, "safetensors", "hf"), (GGUF, "gguf", "gguf"), (ZIP, "pickle", "hf"), (LEGACY, "pickle", "hf"),
    (LLAMA2C, "llama2c", "llama2c"),
])
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "pytorch_model.bin", "model.pt", "blob"])
def test_content_decides_the_format(tmp_path, name, made, kind, naming):
    path = tmp_path / name
    path.write_bytes(made)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.format, checkpoint.naming) == (kind, naming)
    assert checkpoint.files == {"weights": [path]}
    if naming != "llama2c":
        np.testing.assert_array_equal(checkpoint.tensors["w"].f32(), make.values(2))
        assert checkpoint.config == {}


def test_header_lengths_that_look_like_other_formats(tmp_path):
    """A safetensors file may begin with any two bytes, also those of a pickle, a web page or a JSON file."""
    path = tmp_path / "model.safetensors"
    for length in (0x0280, 0x3C, 0x7B, 0x4B50):
        text = json.dumps({"__metadata__": {}}).encode().ljust(length)
        path.write_bytes(make.safetensors(text))
        assert detect(path) == "safetensors"


@pytest.mark.parametrize(("made", "match"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    (b"<!DOCTYPE html><html>", "web page"),
    (b'{"weight_map": {}}', "JSON"),
    (b"lmgg" + bytes(20), "old GGML"),
    (b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5"),
    (b"hello", "not a checkpoint of a known format"),
    (bytes(100), "not a checkpoint of a known format"),
    (b"", "empty"),
])
def test_what_is_not_weights(tmp_path, made, match):
    make.refused(open_checkpoint, tmp_path / "model.bin", made, match)


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file"):
        open_checkpoint(tmp_path / "gone.gguf")
    with pytest.raises(ModelNotFoundError, match="no weights here"):
        open_checkpoint(tmp_path)
    with pytest.raises(FormatError, match="too long"):
        open_checkpoint("x" * 10_000)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


def fill(folder, **files: bytes | str) -> None:
    for name, content in files.items():
        name = name.replace("__", ".")
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_folder_prefers_safetensors(tmp_path):
    fill(tmp_path, model__safetensors=SAFETENSORS, pytorch_model__bin=ZIP, w__gguf=GGUF)
    assert open_checkpoint(tmp_path).format == "safetensors"
    (tmp_path / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path).format == "pickle"
    (tmp_path / "pytorch_model.bin").unlink()
    assert open_checkpoint(tmp_path).format == "gguf"


def test_side_files_by_role(tmp_path):
    fill(tmp_path, model__safetensors=SAFETENSORS, config__json='{"hidden_size": 2}', tokenizer__json="{}",
         tokenizer_config__json="{}", generation_config__json="{}", spiece__model="x", vocab__txt="a",
         chat_template__jinja="{{ x }}", tok512__bin=b"x")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == {"hidden_size": 2}
        files = {role: found.name for role, found in checkpoint.files.items() if role != "weights"}
        assert files == {"config": "config.json", "tokenizer.json": "tokenizer.json", "tokenizer.model": "spiece.model",
                         "tokenizer_config": "tokenizer_config.json", "generation_config": "generation_config.json",
                         "vocab.txt": "vocab.txt", "chat_template": "chat_template.jinja",
                         "tokenizer.bin": "tok512.bin"}


def test_a_gguf_with_a_vocabulary_ignores_its_neighbours(tmp_path):
    tokens = make.pair("tokenizer.ggml.tokens", 9, b"\x08\0\0\0" + b"\1" + bytes(7) + make.text("a"))
    fill(tmp_path, bare__gguf=GGUF, full__gguf=make.gguf([tokens]), tokenizer__json="{}")
    assert set(open_checkpoint(tmp_path / "bare.gguf").files) == {"tokenizer.json", "weights"}
    assert set(open_checkpoint(tmp_path / "full.gguf").files) == {"weights"}


@pytest.mark.parametrize("config", ["[]", "{", "\xff", '{"a":' + "[" * 50_000])
def test_a_broken_config(tmp_path, config):
    fill(tmp_path, model__safetensors=SAFETENSORS, config__json=config)
    with pytest.raises(FormatError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_loose_files(tmp_path):
    fill(tmp_path, stories__bin=LLAMA2C, tokenizer__bin=b"x", tok9__bin=b"x", training_args__bin=b"x")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "llama2c"
    assert checkpoint.files["tokenizer.bin"].name == "tokenizer.bin"
    (tmp_path / "tokenizer.bin").unlink()
    assert open_checkpoint(tmp_path).files["tokenizer.bin"].name == "tok9.bin"
    fill(tmp_path, other__pt=ZIP)
    with pytest.raises(FormatError, match=r"several models, name one: other\.pt, stories\.bin"):
        open_checkpoint(tmp_path)


def test_several_gguf_files(tmp_path):
    fill(tmp_path, one__gguf=GGUF, two__gguf=GGUF)
    with pytest.raises(FormatError, match=r"several models, name one: one\.gguf, two\.gguf"):
        open_checkpoint(tmp_path)


NO_MODELS = [("general.type", "adapter", "an adapter, .*--adapter"), ("general.type", "imatrix", "--imatrix"),
             ("general.type", "mmproj", "images or sound"), ("general.architecture", "clip", "images or sound"),
             ("general.architecture", "controlvector", "a control vector")]


@pytest.mark.parametrize(("key", "value", "match"), NO_MODELS)
def test_gguf_files_that_are_no_models(tmp_path, key, value, match):
    other = make.gguf([make.pair(key, 8, make.text(value))], [make.entry("w", [2], 0, 0)], make.values(2).tobytes())
    make.refused(open_checkpoint, tmp_path / "x.gguf", other, match)
    fill(tmp_path, a__gguf=other, model__gguf=GGUF)
    (tmp_path / "x.gguf").unlink()
    assert open_checkpoint(tmp_path).files["weights"] == [tmp_path / "model.gguf"]
    fill(tmp_path, damaged__gguf=GGUF[:40])
    with pytest.raises(FormatError, match=r"several models, name one: damaged\.gguf, model\.gguf"):
        open_checkpoint(tmp_path)


def test_shards_of_two_formats(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(SAFETENSORS)
    (tmp_path / "model-2.safetensors").write_bytes(ZIP)
    with pytest.raises(FormatError, match="different formats: pickle, safetensors"):
        open_checkpoint(tmp_path)


def fixtures() -> list[str]:
    try:
        folder = shared("fixtures")
    except pytest.skip.Exception:
        return []
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


@pytest.mark.parametrize("name", fixtures())
def test_every_fixture_reads(name):
    checkpoint = open_checkpoint(shared("fixtures", name))
    assert checkpoint.naming == "hf"
    assert checkpoint.config
    for tensor in checkpoint.tensors.values():
        read = tensor.f32()
        assert read.shape == tensor.shape
        assert np.isfinite(read).all() or "mask" in tensor.name


def test_the_same_model_in_two_formats():
    """bloomz_3b was published as safetensors and as a pickle."""
    first, second = (open_checkpoint(shared("fixtures", name)) for name in ("bloomz_3b", "bloomz_3b_pickle"))
    assert first.tensors.keys() == second.tensors.keys()
    assert all(first.tensors[n].shape == second.tensors[n].shape for n in first.tensors)


def test_a_sentence_encoder_s_own_files():
    files = open_checkpoint(real_model("all-MiniLM-L6-v2")).files
    assert {"config", "tokenizer.json", "vocab.txt", "modules", "pooling"} <= set(files)
