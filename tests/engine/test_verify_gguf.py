"""GGUF files against their source, and the warning about quantised sources."""

import shutil

import pytest

from numflow import formats
from numflow.engine.quantise.export import export_gguf
from numflow.engine.quantise.quantize import quantize
from numflow.engine.quantise.verify import verify
from numflow.errors import FormatError
from numflow.formats.gguf_mixes import MIXES
from numflow.formats.gguf_writer import WRITTEN
from numflow.network.quantise.quantise import already_quantised
from numflow.quant.recipe import read_recipe
from tests.engine.test_export import write_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and the same as Q4_K_M."""
    folder = tmp_path_factory.mktemp("gguf")
    source = write_gguf(folder / "source.gguf", width=256, ffn=512)
    export_gguf(formats.open_checkpoint(source), folder / "x.gguf", read_recipe("Q4_K_M", WRITTEN, MIXES))
    return source, folder / "x.gguf"


def test_a_file_made_of_the_source(made):
    source, target = made
    report = verify(target, source)
    assert {row["type"] for row in report["tensors"]} == {"F32", "Q4_K", "Q6_K"}
    assert 4.5 < report["bits_per_weight"] < 6.6 and report["source"]["files"][0]["name"] == "source.gguf"
    with pytest.raises(FormatError, match="carries no report; .*--against SRC compares it"):
        verify(target)


def damaged(made, tmp_path, name, change):
    """A copy of the made file with other bytes in a tensor."""
    target = tmp_path / "x.gguf"
    shutil.copy(made[1], target)
    data = formats.open_checkpoint(target).tensors[name].raw().tobytes()
    content = target.read_bytes()
    assert content.count(data) == 1
    target.write_bytes(content.replace(data, change(data)))
    return target


@pytest.mark.parametrize("name, change, told", [
    ("blk.1.ffn_up.weight", lambda data: data[:-144] + bytes(144), None),
    ("blk.1.ffn_up.weight", lambda data: data[9216:] + data[:9216], r"'blk\.1\.ffn_up\.weight' has an error of"),
    ("output_norm.weight", lambda data: data[4:] + data[:4], r"tensor 'output_norm\.weight' has other bytes")])
@pytest.mark.thin(2)
def test_damage_is_named(made, tmp_path, name, change, told):
    target = damaged(made, tmp_path, name, change)
    if told is None:  # a block of 512 may be as another program rounds it
        verify(target, made[0])
        return
    with pytest.raises(FormatError, match=f"{target} is not made of {made[0]}: .*{told}"):
        verify(target, made[0])


def test_another_model_is_named(made, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", width=256, ffn=256)
    with pytest.raises(FormatError, match=r"'blk\.0\.ffn_gate\.weight' is \[512, 256\], in the source \[256, 256\]"):
        verify(made[1], other)
    less = write_gguf(tmp_path / "less.gguf", width=256, ffn=512, change=lambda tensors: tensors.pop("output.weight"))
    with pytest.raises(FormatError, match=r"tensor 'output\.weight' is not in the source"):
        verify(made[1], less)


def test_sources_of_few_bits_are_told_of(made, tmp_path):
    source, target = made
    assert already_quantised(formats.open_checkpoint(source)) == ""
    line = already_quantised(formats.open_checkpoint(target))
    assert line.startswith(f"16 of 16 matrices of {target} are quantised already (Q4_K, Q6_K): ")
    quantize(formats.open_checkpoint(source), tmp_path / "x", read_recipe("q4"))
    assert "(q4)" in already_quantised(formats.open_checkpoint(tmp_path / "x"))
    export_gguf(formats.open_checkpoint(source), tmp_path / "y.gguf", read_recipe("q8", WRITTEN))
    assert already_quantised(formats.open_checkpoint(tmp_path / "y.gguf")) == ""
