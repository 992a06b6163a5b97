"""Commands on a checkpoint that was quantised by another program."""

import json

import pytest

from tests.formats.quantised_files import made, save
from tests.quant.small import CONFIG, write_model


@pytest.fixture
def coded(tmp_path):
    """A model with NF4 weights in all linear layers."""
    stored, said = {}, {}

    def change(tensors):
        for name, values in tensors.items():
            if name.endswith("_proj.weight"):
                parts, _, said["quantization_config"] = made("nf4", *values.shape)
                stored.update({f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()})
            else:
                stored[name] = "F32", values

    write_model(tmp_path, ffn=128, change=change)
    save(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 128, **said}))
    return tmp_path


def test_inspect_shows_method_and_types(run, coded):
    found = run("inspect", coded)
    assert found.code == 0 and "bitsandbytes (quantization_config of config.json)" in found.out
    said = json.loads(run("inspect", coded, "--json").out)
    assert said["quantised"].startswith("bitsandbytes")
    found = [of for kind, of in said["types"].items() if kind in ("NF4_64", "NF4_ROW")]  # rows of 64 are one block
    assert [of["tensors"] for of in found] in ([12, 2], [2, 12])
    assert all(of["bytes"] == of["weights"] * 4.5 / 8 for of in found)


@pytest.mark.merge
def test_a_draft_needs_no_word_of_it(run, coded):
    found = run("spec", "new", coded)
    assert found.code == 0 and 'extends = "llama"' in found.out and "quant" not in found.out


@pytest.mark.merge
def test_quantising_again_is_warned_of(run, coded, tmp_path):
    found = run("quantize", coded, tmp_path / "again.safetensors", "--weights", "q4", "--no-calibration")
    assert found.code == 0 and "is quantised already, by bitsandbytes" in found.err
    assert run("inspect", tmp_path / "again.safetensors").code == 0


def test_a_method_that_is_not_known_ends_in_a_line(run, coded):
    (coded / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "sparkle"}}))
    found = run("generate", "-m", coded, "hello")
    assert found.code == 1 and "quantised by 'sparkle'" in found.err and found.err.count("\n") == 1
