"""The list of known models, and resolution of names."""

import os
import re
import sys
from pathlib import Path

import pytest

from numflow import registry
from numflow.errors import DownloadError, ModelNotFoundError, SpecError
from numflow.registry import hub, paths


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path))
    return tmp_path


def test_every_shipped_entry_is_complete():
    entries = registry.known()
    assert registry.default_model() in entries
    names = [word.casefold() for entry in entries.values() for word in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    for entry in entries.values():
        assert entry.about and entry.license
        for wheel in entry.wheels:
            assert re.fullmatch("[0-9a-f]{64}", wheel.sha256) and wheel.bytes > 0
            assert wheel.file.startswith(wheel.package.replace("-", "_") + f"-{wheel.version}-")
        for file in entry.files:
            assert len(file.parts) == 1 or file.sha256, "a joined file needs a hash of its own"
            assert all(index < len(entry.wheels) for index, _ in file.parts)
        if entry.source == "pypi":
            assert entry.load == "." or entry.load in [file.path for file in entry.files]
        if entry.source == "hf":
            assert hub.parse(entry.repo) == (entry.repo, "", None)


def test_names_are_found_whatever_their_case():
    assert registry.find("SmolLM2").name == "smollm2-135m-instruct"
    assert registry.find("nothing-like-it") is None


def test_sizes_and_quantisations_behind_a_colon():
    assert registry.find("Qwen3:4b").name == "qwen3-4b" and registry.find("llama3.2:latest").name == "llama3.2-3b"
    assert registry.find("llama3.2:Q8_0").patterns == ("Q8_0",)
    assert registry.find("qwen3:4b:iq4_xs").patterns == ("iq4_xs",)
    assert registry.find("llama3.2:tiny") is None and registry.find("smollm2:q8_0") is None  # it is one file


def test_models_that_come_with_numflow():
    for purpose in ("generate", "fill-mask", "translate"):
        entry = registry.known()[registry.shipped_model(purpose)]
        assert entry.source == "shipped" and registry.default_model(purpose) != entry.name
    assert registry.shipped_model("embed") is None
    assert registry.resolve("tiny-translator").name == "tiny-translator"
    with pytest.raises(ModelNotFoundError, match="tiny-translator is a part of numflow"):
        registry.remove("tiny-translator")


def test_without_a_network_the_one_that_comes_with_numflow(home, monkeypatch, tmp_path):
    assert registry.reachable("embed") == (registry.default_model("embed"), "")
    monkeypatch.setattr("numflow.registry.paths.shipped_models", lambda: tmp_path)
    assert registry.reachable() == (registry.default_model(), "")  # it did not come along
    (tmp_path / "tiny").mkdir()
    name, why = registry.reachable()
    assert name == "tiny" and "is not on this disk and numflow is offline" in why
    monkeypatch.setattr("numflow.registry.store.resolve", lambda *_: tmp_path)
    assert registry.reachable() == (registry.default_model(), "")


def test_tasks_are_those_of_commands():
    """And of the option --draft."""
    tasks = {entry.task for entry in registry.known().values()}
    assert tasks <= {"chat", "code", "draft", "embed", "rerank", "fill-mask", "translate"}
    assert len(registry.known()) >= 60


def test_unknown_names_get_the_nearest():
    with pytest.raises(ModelNotFoundError, match="no model, file or folder named 'smolm2'; did you mean 'smollm2'"):
        registry.resolve("smolm2")


@pytest.mark.parametrize("name", ["./gone", "~/gone-there", "gone.gguf", "gone/model.safetensors", os.sep + "gone"])
def test_a_path_that_is_not_there_is_not_looked_up(name):
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        registry.resolve(name)


def test_a_missing_file_in_a_folder_that_exists_is_not_a_hub_id(home, monkeypatch):
    monkeypatch.chdir(home)
    Path("models").mkdir()
    with pytest.raises(ModelNotFoundError, match="no file or folder models"):
        registry.resolve("models/gone")


def test_the_users_list_adds_and_replaces(home):
    weights = home / "w.gguf"
    text = f'[mine]\nsource = "file"\npath = "{weights.as_posix()}"\n[other]\naliases = ["smollm2"]\nsource = "file"\n'
    paths.user_catalogue().write_text(text + 'path = "elsewhere"\n')
    with pytest.raises(ModelNotFoundError, match=r"mine: no file or folder .*w\.gguf"):
        registry.resolve("mine")
    weights.touch()
    assert registry.resolve("Mine") == weights
    assert registry.find("smollm2").name == "other"


@pytest.mark.parametrize("text, complaint", [
    ("[a", "not valid TOML"),
    ("a = 1", r"\[a\]: expected a table"),
    ("[a]\nsource = 'ftp'", r"\[a\]: source should be one of pypi, hf, file, shipped, is 'ftp'"),
    ("[a]\nsource = 'hf'", r"\[a\]: source 'hf' needs 'repo'"),
    ("[a]\nsource = 'file'\npath = 'x'\ncolour = 1", r"\[a\]: .*unexpected keyword argument 'colour'"),
    ("['../a']\nsource = 'file'\npath = 'x'", "a model's name is made of"),
    ("[a]\nsource = 'file'\npath = 'x'\nload = '../../etc'", "inside the model's folder"),
])
def test_a_wrong_list_names_file_and_key(text, complaint):
    paths.user_catalogue().write_text(text)
    with pytest.raises(SpecError, match=rf"models\.toml: .*{complaint}|models\.toml: {complaint}"):
        registry.known()


def test_home_follows_the_platform(monkeypatch):
    monkeypatch.delenv("NUMFLOW_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.abspath("/x"))
    assert paths.home() == Path(os.path.abspath("/x")) / "numflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert paths.models_dir() == Path.home() / ".cache/numflow/models"


@pytest.mark.parametrize("name, parsed", [
    ("org/name", ("org/name", "", None)),
    ("org/name:Q4_K_M", ("org/name", "Q4_K_M", None)),
    ("org/na.me-2@v1", ("org/na.me-2", "", "v1")),
    ("org/name:x.gguf@main", ("org/name", "x.gguf", "main")),
    ("name", None), ("a/b/c", None), ("org/", None), ("/name", None),
])
def test_hub_ids(name, parsed):
    assert hub.parse(name) == parsed


def test_hub_files_are_chosen():
    repo = ["README.md", "config.json", "tokenizer.json", "tokenizer.model", "model-1.safetensors",
            "model-2.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "onnx/model.onnx",
            "original/consolidated.00.pth"]
    chosen = hub.choose("o/n", repo)
    assert chosen[:2] == ["model-1.safetensors", "model-2.safetensors"]
    assert set(chosen[2:]) == {"config.json", "tokenizer.json", "tokenizer.model", "model.safetensors.index.json"}
    assert hub.choose("o/n", ["config.json", "pytorch_model.bin"]) == ["pytorch_model.bin", "config.json"]


def test_hub_modules_of_an_embedding_come_along():
    repo = ["model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/config.json",
            "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "3_Dense/pytorch_model.bin", "onnx/config.json"]
    assert hub.choose("o/n", repo) == [repo[0], "modules.json", *repo[2:5], "3_Dense/pytorch_model.bin"]


def test_hub_gguf_is_one_model():
    ggufs = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    assert hub.choose("o/n", ggufs, "q8_0") == ["m-Q8_0.gguf"]
    assert hub.choose("o/n", ggufs[3:]) == ggufs[3:]
    lines = []
    assert hub.choose("o/n", ggufs, tell=lines.append) == ["m-Q4_K_M.gguf"]
    assert lines == ["o/n has 3 GGUF models: taking m-Q4_K_M.gguf; o/n:QUANTISATION takes another"]
    with pytest.raises(ModelNotFoundError, match=r"several models: big\.gguf, other\.gguf; choose one, such as o/n:b"):
        hub.choose("o/n", [*ggufs[3:], "other.gguf"])
    with pytest.raises(ModelNotFoundError, match=r"no weights match 'Q3'; it has .*m-Q8_0\.gguf"):
        hub.choose("o/n", ggufs, "Q3")
    with pytest.raises(ModelNotFoundError, match="no safetensors, GGUF or pickled weights"):
        hub.choose("o/n", ["README.md"])


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """A hub with one repository, whose download is a folder made here."""
    import huggingface_hub

    folder = tmp_path / "snapshot"
    folder.mkdir()
    calls = []

    def download(repo, revision=None, local_files_only=False, allow_patterns=None):
        calls.append((repo, revision, local_files_only, allow_patterns))
        return str(folder)

    monkeypatch.delenv("NUMFLOW_OFFLINE")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: ["config.json", "m.safetensors"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return folder, calls


def test_hub_download_asks_for_what_is_needed(fake_hub):
    folder, calls = fake_hub
    assert registry.resolve("o/n@v2", progress=False) == folder
    assert calls == [("o/n", "v2", False, ["m.safetensors", "config.json"])]


def test_hub_offline_checks_that_all_shards_are_there(fake_hub):
    folder, calls = fake_hub
    (folder / "m-1.safetensors").touch()
    (folder / "m.safetensors.index.json").write_text('{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}')
    with pytest.raises(ModelNotFoundError, match="not all of it"):
        registry.resolve("o/n", offline=True)
    (folder / "m-2.safetensors").touch()
    assert registry.resolve("o/n", offline=True) == folder
    assert all(local for _, _, local, _ in calls)


@pytest.mark.parametrize("error, line", [
    (ConnectionError("[Errno -2] Name or service not known"), "the hub cannot be reached"),
    (RuntimeError("503: try later\nand more lines"), "503: try later"), (RuntimeError(), "RuntimeError")])
def test_hub_failures_are_one_line(monkeypatch, fake_hub, error, line):
    import huggingface_hub

    def fail(repo, revision=None):
        raise error

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    with pytest.raises(DownloadError, match=f"^o/n: {line}$"):
        registry.resolve("o/n", progress=False)
