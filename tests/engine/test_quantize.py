"""Quantised model files: they run alone, are read by others, appear whole or not at all, and can be checked."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import numflow
from numflow import formats
from numflow.engine.quantise import quantize as module
from numflow.engine.quantise.calibrate import calibrate
from numflow.engine.quantise.quantize import quantize
from numflow.engine.quantise.report import report_sha
from numflow.engine.quantise.verify import verify
from numflow.errors import FormatError, ModelNotFoundError, RequestError
from numflow.formats import container, writer
from numflow.quant.recipe import Recipe, read_recipe
from tests.conftest import real_model, shared
from tests.engine.published import write_case
from tests.quant.small import TEXT, write_model

MIX = Recipe("mix", "q3h", (("token_embd", "q6"), ("*.attn_v", "q4_b32t1a"), ("output", "keep")))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """(file, report)"""
    file = tmp_path_factory.mktemp("made") / "small.safetensors"
    return file, quantize(formats.open_checkpoint(source), file, MIX)


def test_it_runs_alone_as_if_quantised_at_load(source, made, tmp_path):
    alone = shutil.copy(made[0], tmp_path / "alone.safetensors")
    recipe = tmp_path / "mix.toml"
    recipe.write_text(MIX.toml())
    with (numflow.load(alone, backend="reference") as a,
          numflow.load(source, backend="reference", weights=recipe, calibration=False, progress=False) as b):
        np.testing.assert_array_equal(a.logits([1, 2, 3]), b.logits([1, 2, 3]))
        assert a.tokenizer.encode("ab c") == b.tokenizer.encode("ab c")
        assert a.generate("12 bottles", max_tokens=3).ids == b.generate("12 bottles", max_tokens=3).ids
        assert a.bits_per_weight == pytest.approx(b.bits_per_weight)


def test_other_readers_see_plain_tensors(made):
    tensors = load_file(made[0])
    assert tensors["model.norm.weight"].dtype == np.float32
    embedding = tensors["model.embed_tokens.weight"]
    assert embedding.dtype == np.uint8 and embedding.shape[0] == 257
    assert json.loads(tensors["numflow/config"].tobytes())["hidden_size"] == 64
    assert b'"model"' in tensors["numflow/tokenizer.json"].tobytes()


def test_the_report_says_what_was_done(source, made):
    file, report = made
    assert container.read_report(file) == report
    rows = {row["name"]: row for row in report["tensors"]}
    embedding, value = rows["model.embed_tokens.weight"], rows["model.layers.0.self_attn.v_proj.weight"]
    assert (embedding["type"], embedding["modules"], embedding["from"]) == ("q6", ["token_embd"], "F32")
    assert 0.012 < embedding["error"] < 0.02 and value["type"] == "q4_b32t1a"
    assert rows["lm_head.weight"]["type"] == "F32" and "error" not in rows["lm_head.weight"]
    assert report["recipe"] == MIX.as_dict() and report["kept"] == {"lm_head.weight": ""}
    quantised = [row for row in rows.values() if "error" in row]
    weights = sum(np.prod(row["shape"]) for row in quantised)
    assert report["bits_per_weight"] == pytest.approx(8 * sum(row["bytes"] for row in quantised) / weights, abs=1e-6)
    assert [f["name"] for f in report["source"]["files"]] == ["model.safetensors"]
    assert verify(file) == verify(file, source) == report


def test_the_same_bytes_with_any_number_of_threads(source, made, tmp_path):
    for threads in (1, 3):
        other = tmp_path / f"{threads}.safetensors"
        quantize(formats.open_checkpoint(source), other, MIX, threads=threads)
        assert other.read_bytes() == made[0].read_bytes()


def test_a_model_in_a_container_can_be_quantised_again(made, tmp_path):
    report = quantize(formats.open_checkpoint(made[0]), tmp_path / "again.safetensors", read_recipe("q4"))
    assert {row["from"] for row in report["tensors"]} >= {"q3h", "q6"}
    assert verify(tmp_path / "again.safetensors", made[0])["recipe"]["name"] == "q4"


@pytest.mark.parametrize("place, message", [
    ("data", "tensor '.*' has other bytes"), ("file", "the file 'tokenizer.json' in it is another one"),
    ("config", "its config is another one"), ("role", "its metadata is another one"),
    ("report", "its report has been changed"), ("hash", "its report has been changed")])
def test_changes_are_noticed(source, made, tmp_path, place, message):
    data, file = bytearray(made[0].read_bytes()), tmp_path / "changed.safetensors"
    at = {"report": data.rindex(b'"error": 0.01') + 13, "file": data.index(b'"added_tokens"') + 9,
          "hash": data.rindex(b'"sha256": "') + 15, "config": data.rindex(b'"rope_theta": 10000') + 15,
          "role": data.index(b': \\"tokenizer.json') + 5, "data": len(data) // 2}[place]
    data[at] ^= 1
    file.write_bytes(data)
    for against in (None, source):
        with pytest.raises(FormatError, match=message):
            verify(file, against)


@pytest.mark.parametrize("name, matrices", [("gpt2", 13), ("gpt_oss", 11)])
@pytest.mark.merge
def test_matrices_stored_as_inputs_by_outputs(name, matrices, tmp_path):
    source, file, again = write_case(name, tmp_path), tmp_path / "x", tmp_path / "again"
    report = quantize(formats.open_checkpoint(source), file, read_recipe("q4"))
    assert sum("error" in row for row in report["tensors"]) == matrices and max(
        row["error"] for row in report["tensors"] if "error" in row) < 0.1
    assert verify(file, source) == report
    quantize(formats.open_checkpoint(file), again, read_recipe("q2"))
    verify(again, file)
    ids, found = list(range(5, 25)), []
    for path, options in ((file, {}), (source, {"weights": "q4", "calibration": False}),
                          (file, {"backend": "cpu", "activations": "f32"}),
                          (source, {})):
        with numflow.load(path, **{"backend": "reference", **options}) as model:
            found.append(model.logits(ids))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[2], found[0], atol=1e-4 * np.std(found[3]))
    assert 0.05 < np.std(found[0] - found[3]) / np.std(found[3]) < 0.8


def test_a_type_that_is_none_is_refused_by_its_place(made, tmp_path):
    file = tmp_path / "changed.safetensors"
    file.write_bytes(made[0].read_bytes().replace(rb'{\"type\": \"q3h\"', rb'{\"type\": \"q3x\"', 1))
    with pytest.raises(FormatError, match=f"{file}: tensor '.*': metadata numflow: no tensor type named 'q3x'"):
        formats.open_checkpoint(file)


@pytest.mark.merge
def test_any_byte_may_be_the_changed_one(made, tmp_path):
    data, file = bytearray(made[0].read_bytes()), tmp_path / "changed.safetensors"
    header = 8 + int.from_bytes(data[:8], "little")
    ends = range(header, len(data))
    for at in [*range(8), *range(8, header, 61), *ends[:-12_000:2003], *ends[-12_000::151]]:
        data[at] ^= 4
        file.write_bytes(data)
        with pytest.raises(FormatError):
            verify(file)
        data[at] ^= 4


def test_a_report_that_claims_other_errors(source, made, tmp_path):
    file = tmp_path / "claims.safetensors"
    quantize(formats.open_checkpoint(source), file, MIX)
    report = container.read_report(file)
    next(row for row in report["tensors"] if "error" in row)["error"] *= 1.01
    text = json.dumps({**report, "sha256": report_sha(report)}).encode()
    data = file.read_bytes()
    begin = data.rindex(b'{"numflow"')
    file.write_bytes(data[:begin] + text.ljust(len(data) - begin))
    verify(file)
    with pytest.raises(FormatError, match="has an error of 0.01.*, the report says 0.01"):
        verify(file, source)


def test_it_may_lie_beside_its_source(tmp_path):
    source = write_model(tmp_path / "source")
    loose = tmp_path / "loose"
    shutil.copytree(source, loose)
    (loose / "model.safetensors").rename(loose / "weights.safetensors")
    for folder in (source, loose):
        quantize(formats.open_checkpoint(folder), folder / "a.safetensors", MIX)
        calibrate(folder, TEXT, 64, 1).write(folder / "calibration.safetensors")
        assert verify(folder / "a.safetensors", folder)["recipe"]["name"] == "mix"
        quantize(formats.open_checkpoint(folder), folder / "b.safetensors", MIX)
    assert (source / "b.safetensors").read_bytes() == (source / "a.safetensors").read_bytes()
    (loose / "weights.safetensors").unlink()
    with pytest.raises(FormatError, match="several models, name one: a.safetensors, b.safetensors"):
        formats.open_checkpoint(loose)
    (loose / "b.safetensors").unlink()
    assert formats.open_checkpoint(loose).tensors["lm_head.weight"].type.name == "F32"
    (loose / "a.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights here"):
        formats.open_checkpoint(loose)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
@pytest.mark.merge
def test_what_has_been_read_leaves_memory(tmp_path):
    source = write_model(tmp_path / "source", ffn=8192) / "model.safetensors"
    tables = [resident(source)]

    def written(done, total):
        tables.append(resident(source))

    quantize(formats.open_checkpoint(source), tmp_path / "x", Recipe("b", "q4_b32t1a"), written=written)
    assert len(tables) > 20 and max(tables) < 256, f"{max(tables)} of {source.stat().st_size >> 10} KiB"


def resident(file) -> int:
    """KiB of a mapped file that are in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and head == "Rss:":
            found += int(line.split()[1])
    return found


def test_another_source_is_noticed(made, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"][0, 0] += 1
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01

    other = write_model(tmp_path, change=change)
    with pytest.raises(FormatError, match="has other hashes than its source had; tensor '.*up_proj.*' has an error"):
        verify(made[0], other)
    with pytest.raises(FormatError, match="not one that `numflow quantize` made"):
        verify(other / "model.safetensors")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_half_written_remains(source, tmp_path, monkeypatch, failure):
    target, calls = tmp_path / "out.safetensors", []
    target.write_bytes(b"what was there before")

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) > 3:
            raise failure
        return original(*arguments)

    original = module.encoded
    monkeypatch.setattr(module, "encoded", fails)
    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else RequestError, match="No space left|^$"):
        quantize(formats.open_checkpoint(source), target, MIX, replace=True)
    assert len(calls) == 4
    assert target.read_bytes() == b"what was there before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_foreseen(source, tmp_path, monkeypatch):
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(RequestError, match="out.safetensors: needs .* bytes, the disk has 10 left"):
        quantize(formats.open_checkpoint(source), tmp_path / "out.safetensors", MIX)
    assert not list(tmp_path.iterdir())


def test_targets_that_cannot_be(source, made, tmp_path):
    checkpoint = formats.open_checkpoint(source)
    with pytest.raises(RequestError, match="is there already; --force"):
        quantize(checkpoint, made[0], MIX)
    with pytest.raises(RequestError, match="the target is the source itself"):
        quantize(checkpoint, source / "model.safetensors", MIX, replace=True)
    with pytest.raises(RequestError, match="no folder"):
        quantize(checkpoint, tmp_path / "nowhere" / "x", MIX)
    with pytest.raises(RequestError, match="recipe 'none' quantises nothing"):
        quantize(checkpoint, tmp_path / "x", Recipe("none", "keep"))
    assert not list(tmp_path.iterdir())


def test_bad_weights_leave_no_file(tmp_path):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf

    bad = formats.open_checkpoint(write_model(tmp_path / "bad", change=spoil))
    with pytest.raises(FormatError, match="up_proj.weight cannot be quantised: row 3, column 5 is inf"):
        quantize(bad, tmp_path / "x", MIX)
    assert not (tmp_path / "x").exists()


def test_weights_too_small_for_a_scheme_are_reported_as_lost(tmp_path):
    def tiny(tensors):  # whose squares float32 has not
        tensors["model.layers.0.mlp.up_proj.weight"] *= np.float32(1e-25)
        tensors["model.layers.0.mlp.gate_proj.weight"] *= np.float32(1e-38)

    report = quantize(formats.open_checkpoint(write_model(tmp_path, change=tiny)), tmp_path / "x", read_recipe("q4"))
    error = {row["modules"][0]: row["error"] for row in report["tensors"] if "error" in row}
    assert error["blk.0.ffn_up"] == pytest.approx(error["blk.1.ffn_up"], rel=0.1) and error["blk.0.ffn_gate"] == 1
    verify(tmp_path / "x", tmp_path)


@pytest.mark.merge
def test_calibrated_files_are_nearer(source, tmp_path):
    calibration = calibrate(source, TEXT, 64, 8)
    assert len(calibration.importances) == 15  # the table of tokens is not multiplied with
    checkpoint = formats.open_checkpoint(source)
    plain, better = (quantize(checkpoint, tmp_path / name, read_recipe("q3"), c)
                     for name, c in (("plain", None), ("better", calibration)))
    assert better["calibration"]["tokens"] == 512
    with numflow.load(source, backend="reference") as model:
        ids = model.tokenizer.encode(TEXT[-100:])
        expected = model.logits(ids)
    errors = []
    for name in ("plain", "better"):
        with numflow.load(tmp_path / name, backend="reference") as model:
            errors.append(np.linalg.norm(model.logits(ids) - expected))
    assert errors[1] < 0.9 * errors[0]
    assert plain["tensors"][0]["name"] == better["tensors"][0]["name"]


@pytest.mark.parametrize("name", ["stories260K.v0.bin", "stories260K.v2.q8.bin"])
def test_other_formats(name, tmp_path):
    file = shared("data", "llama2c", name)
    quantize(formats.open_checkpoint(file), tmp_path / "x", read_recipe("q8"))
    with numflow.load(tmp_path / "x", backend="reference") as a, numflow.load(file, backend="reference") as b:
        assert a.generate("Once upon", max_tokens=8, chat=False).text == b.generate("Once upon", max_tokens=8,
                                                                                   chat=False).text


@pytest.mark.slow
def test_an_encoder_with_its_embedding_recipe(tmp_path):
    file = real_model("all-MiniLM-L6-v2")
    quantize(formats.open_checkpoint(file), tmp_path / "x", read_recipe("q8"))
    with numflow.load(tmp_path / "x") as a, numflow.load(file) as b:
        assert float(a.embed("a small test") @ b.embed("a small test")) > 0.999
