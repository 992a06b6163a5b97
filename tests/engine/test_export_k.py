"""K types and their mixes in GGUF files, by the names that people use."""

import gguf
import numpy as np
import pytest

import numflow
from numflow import formats
from numflow.engine.quantise.export import export_gguf
from numflow.errors import RequestError
from numflow.formats.gguf_mixes import MIXES
from numflow.formats.gguf_writer import WRITTEN
from numflow.quant.recipe import read_recipe
from tests.engine.test_export import write_gguf
from tests.quant.small import TEXT


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", width=256, ffn=512)


def types(path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("Q2_K", "q3_k", "Q6_K")),
                                  "Q4_K", "q5_K"])
@pytest.mark.merge
def test_each_k_type(source, tmp_path, name):
    target, checkpoint = tmp_path / "x.gguf", formats.open_checkpoint(source)
    report = export_gguf(checkpoint, target, read_recipe(name, WRITTEN, MIXES))
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    for row in report["tensors"]:
        tensor, x = theirs[row["name"]], checkpoint.tensors[row["name"]].f32()
        assert tensor.tensor_type.name == row["type"] == (name.upper() if x.ndim == 2 else "F32")
        y = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(x.shape)
        found = np.linalg.norm(y - x) / np.linalg.norm(x)
        assert found == pytest.approx(row.get("error", 0), rel=1e-4, abs=1e-9)
    with numflow.load(target, backend="reference") as a, numflow.load(source, backend="reference") as b:
        found, expected = a.logits(list(TEXT[:20].encode())), b.logits(list(TEXT[:20].encode()))
    assert np.linalg.norm(found - expected) < (0.4 if int(name[1]) > 3 else 1.2) * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["Q4_K_M", "Q2_K_S", "Q3_K_M", "IQ4_XS", "IQ4_NL",
                                  *(pytest.param(name, marks=pytest.mark.slow) for name in ("Q5_K_M", "Q6_K"))])
@pytest.mark.thin(5)
def test_all_readers_see_the_same_numbers(source, tmp_path, name):
    """To the bit, here gguf-py; so in float32 a file's logits are the same whoever de-quantises it, but for the order
    of sums: matrices of one type are multiplied together."""
    target, plain = tmp_path / "x.gguf", tmp_path / "plain.gguf"
    export_gguf(formats.open_checkpoint(source), target, read_recipe(name, WRITTEN, MIXES))
    ours, theirs = formats.open_checkpoint(target), {}
    for tensor in gguf.GGUFReader(target).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        theirs[tensor.name] = values.reshape(ours.tensors[tensor.name].shape)
        np.testing.assert_array_equal(ours.tensors[tensor.name].f32().view(np.uint32),
                                      theirs[tensor.name].view(np.uint32))
    write_gguf(plain, lambda tensors: tensors.update(theirs), width=256, ffn=512)
    with numflow.load(target, backend="reference") as a, numflow.load(plain, backend="reference") as b:
        found, expected = (model.logits(list(TEXT[:20].encode())) for model in (a, b))
    assert np.abs(found - expected).max() < 1e-5 * expected.std()


def test_a_mix_and_a_recipe_over_it(source, tmp_path):
    checkpoint = formats.open_checkpoint(source)
    export_gguf(checkpoint, tmp_path / "x.gguf", read_recipe("q4_k_m", WRITTEN, MIXES))
    found = types(tmp_path / "x.gguf")
    assert found["output.weight"] == "Q6_K"
    assert found["token_embd.weight"] == found["blk.0.attn_q.weight"] == "Q4_K"
    assert (found["blk.0.ffn_down.weight"], found["blk.1.ffn_down.weight"]) == ("Q4_K", "Q6_K")
    file = tmp_path / "r.toml"
    file.write_text('weights = "Q4_K_M"\n[tensors]\n"blk.1.ffn_down" = "q8"\n"*attn_k*" = "keep"\n')
    export_gguf(checkpoint, tmp_path / "y.gguf", read_recipe(file, WRITTEN, MIXES))
    changed = {name: kind for name, kind in types(tmp_path / "y.gguf").items() if kind != found[name]}
    assert changed == {"blk.1.ffn_down.weight": "Q8_0", "blk.0.attn_k.weight": "F32", "blk.1.attn_k.weight": "F32"}


def test_rows_that_256_does_not_divide(tmp_path):
    small = write_gguf(tmp_path / "small.gguf")
    export_gguf(formats.open_checkpoint(small), tmp_path / "x.gguf", read_recipe("Q4_K_M", WRITTEN, MIXES))
    found = types(tmp_path / "x.gguf")
    assert found["output.weight"] == "Q8_0" and found["blk.0.attn_q.weight"] == "Q5_0"


@pytest.mark.parametrize("name, kind", [("q8", "Q8_0"), ("Q4", "Q4_0"), ("q5", "Q5_0"), ("Q6", "Q6_K"), ("q3", "Q3_K"),
                                        ("bf16", "BF16"), ("Q4_K_s", "Q4_K_S"), ("q5_k_m", "Q5_K_M")])
def test_names_that_people_use(name, kind):
    assert read_recipe(name, WRITTEN, MIXES).weights == kind


def test_presets_are_of_types_too():
    recipe = read_recipe("q4-mix", WRITTEN, MIXES)
    assert recipe.weights == "Q4_0" and recipe.scheme("token_embd") == "Q6_K" and recipe.scheme("x.attn_v") == "Q5_0"


@pytest.mark.parametrize("name", ["q3h", "iq1_s", "q3h-mix", "Q4_K_X"])
def test_others_are_refused_with_a_list(name):
    with pytest.raises(RequestError) as told:
        read_recipe(name, WRITTEN, MIXES)
    line = str(told.value)
    assert f"no GGUF type that can be written or recipe file {name!r}; known: F32, F16, BF16, Q8_0" in line
    assert "Q4_K_M" in line and "q8 is Q8_0" in line
