"""Specs embedded in a model's file: they read nothing outside the file, and their work is bounded."""

import gc
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import numflow
from numflow import formats, network
from numflow.engine.quantise.quantize import quantize
from numflow.errors import NumflowError, SpecError, TokenizerError
from numflow.quant.recipe import Recipe
from numflow.spec import load_spec
from numflow.tokenizer import load_tokenizer
from tests.quant.small import write_model

RECIPE = Recipe("plain", "q4_b32t1a", ())


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    folder = tmp_path_factory.mktemp("enclosed")
    quantize(formats.open_checkpoint(write_model(folder / "model")), folder / "good.safetensors", RECIPE)
    return folder / "good.safetensors"


@pytest.fixture
def with_spec(container, tmp_path):
    """A function that replaces the embedded spec, and adds files to its folder."""
    def made(text, **others):
        tensors = {name: array for name, array in load_file(container).items() if "/spec/" not in name}
        with open(container, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        about = json.loads(header["__metadata__"]["numflow"])
        files = {name: role for name, role in about["files"].items() if not name.startswith("spec/")}
        for name, content in {"other": text, **others}.items():
            files[f"spec/{name}.toml"] = "spec" if name == "other" else ""
            tensors[f"numflow/spec/{name}.toml"] = bytes_of(content)
        path = tmp_path / "bad.safetensors"
        save_file(tensors, path, {"numflow": json.dumps(about | {"files": files})})
        return formats.open_checkpoint(path)

    return made


def bytes_of(text):
    return np.frombuffer(text.encode(), np.uint8).copy()


@pytest.mark.parametrize("form", ["{outside}", "{outside}.toml", "../outside", "..\\\\outside", "./outside", "outside"])
def test_it_extends_nothing_outside_the_file(with_spec, tmp_path, monkeypatch, form):
    (tmp_path / "outside.toml").write_text("[attention]\nsecret = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="neither in the model's file nor a shipped spec") as error:
        network.choose_spec(with_spec(f'extends = "{form.format(outside=(tmp_path / "outside").as_posix())}"\n'))
    assert "secret" not in str(error.value)


def test_a_file_of_the_working_folder_is_not_taken_for_a_shipped_spec(with_spec, tmp_path, monkeypatch):
    (tmp_path / "llama.toml").write_text("[atention]\n")
    monkeypatch.chdir(tmp_path)
    found = network.choose_spec(with_spec('extends = "llama"\n'))
    assert found.enclosed and found.chain[1] == load_spec("_base").path.with_name("llama.toml")


def test_it_extends_what_came_with_it_wherever_that_was(with_spec):
    found = network.choose_spec(with_spec('extends = "/srv/families/mine.toml"\n',
                                          mine='extends = "llama"\n[model]\ntitle = "Mine"\n'))
    assert found.title == "Mine"


@pytest.mark.parametrize("name", ["/etc/hostname", "../tokenizer.json", "a/../../tokenizer.json",
                                  "..\\\\tokenizer.json", "C:tokenizer.json", "//server/tokenizer.json"])
def test_its_tokenizer_is_no_file_outside(with_spec, tmp_path, name):
    checkpoint = with_spec(f'extends = "llama"\n[tokenizer]\nfile = "{name}"\nkind = "sentencepiece"\n')
    spec = network.choose_spec(checkpoint)
    with pytest.raises(TokenizerError, match="not the name of a file in the model's folder"):
        load_tokenizer(checkpoint, spec.section("tokenizer"))
    with pytest.raises(TokenizerError, match="not the name of a file in the model's folder"):
        quantize(checkpoint, tmp_path / "again.safetensors", RECIPE)


def test_a_file_beside_the_container_is_outside_too(with_spec, tmp_path):
    (tmp_path / "beside.model").write_bytes(b"x")
    checkpoint = with_spec('extends = "llama"\n[tokenizer]\nfile = "beside.model"\n')
    with pytest.raises(TokenizerError, match="no file .*beside.model"):
        load_tokenizer(checkpoint, network.choose_spec(checkpoint).section("tokenizer"))


def test_a_tokenizer_that_the_spec_names_goes_into_the_container(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").rename(folder / "words.json")
    (tmp_path / "mine.toml").write_text('extends = "llama"\n[tokenizer]\nfile = "words.json"\n')
    quantize(formats.open_checkpoint(folder), tmp_path / "made.safetensors", RECIPE, spec=tmp_path / "mine.toml")
    shutil.rmtree(folder)
    with numflow.load(tmp_path / "made.safetensors", backend="reference") as model:
        assert model.tokenizer.decode(model.tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize("scale", [
    "len([0] * 700000000)", "len([0] * 70000 * 70000)", "len(700000000 * [0])", "len([[0] * 9000] * 9000)",
    "len('x' * 999999999)", "len('%999999999d' % 1)", "len('%s' * 9 % 1)", "9 ** 64 ** 2", "len([0] * 10 ** 30)",
    "(10 ** 64) ** 64", "-" * 400 + "1", "1 if [[[0] * 90] * 90] == [[[0] * 90] * 90] * 9 else 2",
])
def test_its_expressions_make_nothing_large(with_spec, scale):
    checkpoint = with_spec(f'extends = "llama"\n[attention]\nscale = "{scale}"\n')
    with pytest.raises(SpecError, match=r"other.toml: attention.scale: "):
        network.build(network.choose_spec(checkpoint), checkpoint)


@pytest.mark.merge
def test_its_expressions_together_take_a_bounded_number_of_steps(with_spec):
    doubling = "\n".join(f'a{i} = "[a{i - 1}, a{i - 1}]"\nb{i} = "[b{i - 1}, b{i - 1}]"' for i in range(1, 12))
    many = " + ".join(["(a11 == b11)"] * 25)
    text = (f'extends = "llama"\n[parameters]\na0 = "[0, 0]"\nb0 = "[0, 0]"\n{doubling}\n'
            + "\n".join(f'c{i} = "{many}"' for i in range(40))
            + f'\n[attention]\nscale = "{"max(" + ", ".join(f"c{i}" for i in range(40)) + ")"}"\n')
    checkpoint = with_spec(text)
    with pytest.raises(SpecError, match=r"take more than \d+ steps"):
        network.build(network.choose_spec(checkpoint), checkpoint)


@pytest.fixture
def uncollected():
    """Garbage collection is off meanwhile: finalisers of other tests' objects would overflow the stack."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(("text", "message"), [
    ('[attention]\nheads = "attention_heads"', "attention.heads depends on itself"),
    ("[parameters]\n" + "\n".join(f'a{i} = "a{i + 1}"' for i in range(900)) + '\n[attention]\nscale = "a0"',
     "depend on one another"),
    ("x = " + "[" * 5000, "nested too deeply"),
    ("[parameters.x" + ".default" * 3000 + "]\ny = 1", "nested too deeply|expected a value"),
    ("#" * (1 << 19), "longer than"),
    ("[attention]\nscale = { config = 5 }", "attention.scale.config: expected text"),
    ('[attention]\nscale = { config = "a", map = "b" }', "attention.scale.map: expected a table"),
    ('[attention]\nscale = "has(5)"', "has\\(\\) takes the name"),
    (f'[attention]\nwindow = {10**20}', "attention.window: expected a whole number of 0 or more up to 2147483647"),
])
@pytest.mark.merge
def test_what_is_wrong_in_it_is_one_line(with_spec, text, message):
    with pytest.raises(SpecError, match=message) as error:
        checkpoint = with_spec(f'extends = "llama"\n{text}\n' if text[0] == "[" else text)
        network.build(network.choose_spec(checkpoint), checkpoint)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y", "a/" * 3000])
def test_names_that_no_file_can_have(tmp_path, name):
    (tmp_path / "my.toml").write_text(f"extends = {json.dumps(name)}\n")
    with pytest.raises(NumflowError, match="extends") as error:
        load_spec(tmp_path / "my.toml")
    assert "\n" not in str(error.value) and len(str(error.value)) < 3000


def test_errors_name_the_file_that_it_is_in(with_spec):
    with pytest.raises(SpecError, match=r"bad\.safetensors.spec.other\.toml: .*hedas"):
        network.choose_spec(with_spec('extends = "llama"\n[model]\nhedas = 3\n'))
