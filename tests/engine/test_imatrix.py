"""Imatrix files and names of GGUF's types, from models of any format to files of both kinds."""

import gguf
import numpy as np
import pytest

import numflow
from numflow import formats
from numflow.engine.quantise.calibrate import calibrate, save
from numflow.engine.quantise.export import export_gguf
from numflow.engine.quantise.quantize import quantize
from numflow.errors import RequestError
from numflow.network.gguf.mixes import named
from numflow.network.quantise.calibration import Calibration, read_calibration
from tests.engine.test_export import write_gguf
from tests.quant.small import TEXT, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def known(folder):
    return calibrate(folder, TEXT, 32, 3, moments=False)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", width=256, ffn=512)


def types(path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def errors(report) -> dict[str, float]:
    return {row["name"]: row["weighted_error"] for row in report["tensors"] if "weighted_error" in row}


@pytest.mark.parametrize("name", ["i.gguf", "i.dat"])
def test_what_matters_reaches_a_gguf_file_by_all_names(folder, known, tmp_path, name):
    """Of our own file, by the folder's names, and of llama.cpp's, by GGUF's."""
    save(known, tmp_path / name, folder)
    read = read_calibration(tmp_path / name)
    assert "blk.1.attn_output.weight" in read.importances and "output.weight" in read.importances
    np.testing.assert_allclose(read.importance("blk.1.ffn_down.weight"),
                               known.importance("model.layers.1.mlp.down_proj.weight"), rtol=1e-5)
    source, recipe = formats.open_checkpoint(folder), named("IQ4_NL", True)
    ours, theirs = (export_gguf(source, tmp_path / f"{i}.gguf", recipe, calibration=c)
                    for i, c in enumerate((known, read)))
    assert errors(theirs) == pytest.approx(errors(ours), rel=1e-3) and errors(ours)
    plain = export_gguf(source, tmp_path / "plain.gguf", recipe)
    changed = {row["name"] for row, other in zip(ours["tensors"], plain["tensors"]) if row["sha256"] != other["sha256"]}
    assert changed == {row["name"] for row in ours["tensors"] if row["type"] == "IQ4_NL"} - {"token_embd.weight"}


def test_an_imatrix_is_of_use_for_schemes_too(folder, known, tmp_path):
    save(known, tmp_path / "i.gguf", folder)
    source, read = formats.open_checkpoint(folder), read_calibration(tmp_path / "i.gguf")
    ours, theirs = (errors(quantize(source, tmp_path / name, named("q3"), c))
                    for name, c in (("a", known), ("b", read)))
    assert theirs == pytest.approx(ours, rel=1e-3)


def test_an_imatrix_of_another_model(folder, known, tmp_path):
    source, recipe = formats.open_checkpoint(folder), named("IQ4_NL", True)
    other = Calibration({"blk.77.attn_q.weight": np.ones(64, np.float32)}, facts={"model": "somebody"})
    with pytest.raises(RequestError, match=r"another model \(somebody\): it has none"):
        export_gguf(source, tmp_path / "x.gguf", recipe, calibration=other)
    other = Calibration({"blk.0.attn_q.weight": np.ones(96, np.float32)}, facts={"model": "somebody"})
    with pytest.raises(RequestError, match=r"blk\.0\.attn_q\.weight has 64 columns, the calibration 96"):
        export_gguf(source, tmp_path / "x.gguf", recipe, calibration=other)
    with pytest.raises(RequestError, match="Q8_0: .*uses no calibration; leave it out"):
        export_gguf(source, tmp_path / "x.gguf", named("Q8_0", True), calibration=known)
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("name", [
    "Q4_K_M", *(pytest.param(name, marks=pytest.mark.slow) for name in ("iq4_xs", "Q5_K"))])
@pytest.mark.merge
def test_names_mean_the_same_in_both_kinds_of_file(wide, tmp_path, name):
    source = formats.open_checkpoint(wide)
    export_gguf(source, tmp_path / "x.gguf", named(name, True))
    report = quantize(source, tmp_path / "x", named(name))
    found = types(tmp_path / "x.gguf")
    assert {row["name"]: row["type"] for row in report["tensors"]} == found
    assert {"Q4_K_M": {"Q4_K", "Q6_K", "F32"}, "iq4_xs": {"IQ4_XS", "Q6_K", "F32"},
            "Q5_K": {"Q5_K", "F32"}}[name] == set(found.values())
    ids = list(TEXT[:20].encode())
    with (numflow.load(tmp_path / "x.gguf", backend="reference") as a, numflow.load(tmp_path / "x", backend="reference")
          as b, numflow.load(wide, weights=name, calibration=False, backend="reference") as c):
        expected = a.logits(ids)
        np.testing.assert_array_equal(b.logits(ids), expected)
        np.testing.assert_array_equal(c.logits(ids), expected)


def test_a_mix_for_a_folder_of_another_format(folder, tmp_path):
    """Of rows that 256 does not divide: the types of the same bits, matrix by matrix as in the GGUF file."""
    source = formats.open_checkpoint(folder)
    report = quantize(source, tmp_path / "x", named("Q4_K_M"))
    export_gguf(source, tmp_path / "x.gguf", named("Q4_K_M", True))
    theirs = types(tmp_path / "x.gguf")
    by_module = {row["modules"][0]: row["type"] for row in report["tensors"] if row["modules"]}
    assert {f"{module}.weight": kind for module, kind in by_module.items()} == {
        name: kind for name, kind in theirs.items() if kind != "F32"}
    assert set(by_module.values()) == {"Q5_0", "Q8_0"}


def test_a_recipe_may_mix_both(folder, tmp_path):
    (tmp_path / "r.toml").write_text('weights = "q4"\n[tensors]\n"*attn_v" = "Q8_0"\n"blk.0.ffn_down" = "iq4_nl"\n')
    report = quantize(formats.open_checkpoint(folder), tmp_path / "x", named(tmp_path / "r.toml"))
    found = {row["modules"][0]: row["type"] for row in report["tensors"] if row["modules"]}
    assert (found["blk.1.attn_v"], found["blk.0.ffn_down"], found["blk.1.ffn_down"]) == ("Q8_0", "IQ4_NL", "q4")


@pytest.mark.parametrize("name", ["Q4_K_X", "iq1_s", "q3h-x"])
def test_names_of_nothing(name):
    with pytest.raises(RequestError, match=f"no quantisation scheme, preset or recipe file '{name}'"):
        named(name)
