"""`numflow cache`: shows the sizes of stored files; removes these files and nothing else."""

import json

import pytest

from numflow import places
from numflow.registry.paths import models_dir


@pytest.fixture
def filled(tmp_path, monkeypatch, run):
    """A home folder with a file of each kind of cache, and a folder of the user's in each."""
    monkeypatch.delenv("NUMFLOW_CACHE")
    assert places.home() == tmp_path / "home"
    contents = {models_dir() / "smollm2-135m-instruct" / "m.gguf": 1000,
                models_dir() / ".gemma-3-270m.partial" / "w": 500,
                places.cache("kernels") / f"norm-{'0' * 16}" / "a.o": 30,
                places.cache("kernels") / "cuda" / "k.cubin": 4,
                places.cache("prepared") / f"{'1' * 16}_{'2' * 16}_{'3' * 16}.safetensors": 200,
                places.cache("prepared") / ".x.1.part": 10,
                places.cache("quantised") / f"{'a' * 16}_b_c.safetensors": 70,
                places.cache("prefixes") / f"{'c' * 16}.session": 5}
    own = [models_dir() / "my-own" / "m.gguf", places.cache("kernels") / "linux" / "kernel.c",
           places.cache("prepared") / "thesis.safetensors", places.cache("quantised") / "notes.txt",
           places.cache("prefixes") / "talk.session"]
    for path, size in {**contents, **dict.fromkeys(own, 9)}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return contents, own


def sizes(run):
    return {row["kind"]: row["bytes"] for row in json.loads(run("cache", "--json").out)}


def test_sizes_are_shown(filled, run):
    assert sizes(run) == {"models": 1500, "kernels": 34, "prepared": 210, "quantised": 70, "prefixes": 5}
    shown = run("cache")
    assert shown.code == 0 and shown.err == ""
    assert str(places.cache("kernels")) in shown.out and "1.5 kB" in shown.out and "NUMFLOW_HOME" in shown.out


def test_one_kind_is_removed(filled, run):
    _, own = filled
    assert "prepared: 210 B removed from" in run("cache", "clear", "prepared").out
    assert sizes(run) == {"models": 1500, "kernels": 34, "prepared": 0, "quantised": 70, "prefixes": 5}
    run("cache", "clear", "models")
    assert sizes(run)["models"] == 0
    assert all(path.exists() for path in own)


def test_all_but_models_are_removed_without_a_kind(filled, run):
    _, own = filled
    assert run("cache", "clear").code == 0
    assert sizes(run) == {"models": 1500, "kernels": 0, "prepared": 0, "quantised": 0, "prefixes": 0}
    assert all(path.exists() for path in own)


def test_an_empty_home_is_fine_and_an_unknown_kind_is_not(run):
    assert run("cache", "clear", "models").code == 0
    wrong = run("cache", "clear", "kernel")
    assert wrong.code == 1 and wrong.err == "error: there is no cache 'kernel'; did you mean 'kernels'?\n"
