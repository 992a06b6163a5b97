"""`embed`, `fill-mask`, `translate` and `experiment`: the arguments that reach the library, and the printed output."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

import numflow
from numflow import lab
from numflow.engine.request import ahead
from numflow.engine.request.facts import ModelFacts
from numflow.engine.run.generation import Generation
from numflow.engine.tasks.fill_mask import Filling
from numflow.errors import RequestError
from tests.engine.fake import network


class TextModel:
    """Replaces a Model; records the calls."""

    network = SimpleNamespace(name="fake")

    def __init__(self):
        self.calls, self.options = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append("closed")

    def embed(self, texts, normalize, pooling, truncate, prompt, dimensions, instruction):
        self.calls.append((texts, normalize, pooling, truncate, prompt, dimensions, instruction))
        return np.array([[len(text), 0.5] for text in texts], np.float32)

    def fill_mask(self, text, top_k):
        self.calls.append((text, top_k))
        return [[Filling("big", 7, 0.75, "a big b [MASK]")], [Filling("old", 8, 0.25, "a [MASK] b old")]]

    def translate(self, texts, source, target, **settings):
        self.calls.append((texts, source, target, settings))
        return [Generation(text.upper(), [1], "stop", {}) for text in texts]


@pytest.fixture
def model(monkeypatch):
    model = TextModel()

    def load(name, **options):
        model.options.append({"name": name, **options})
        return model

    monkeypatch.setattr(numflow, "load", load)
    return model


def test_embed(run, model):
    done = run("embed", "one", "three")
    assert (done.code, done.out, done.err) == (0, "3 0.5\n5 0.5\n", "")
    assert model.calls == [(["one", "three"], True, None, False, None, None, None), "closed"]
    assert model.options[0]["name"] == "all-minilm-l6-v2"


def test_embed_options_and_json(run, model, tmp_path):
    file = tmp_path / "texts"
    file.write_text("one\n\nfour\n")
    done = run("embed", "-f", file, "-m", "m", "--no-normalize", "--pooling", "cls", "--truncate",
               "--prompt", "query", "--dimensions", "2", "--instruction", "sort", "--json")
    assert json.loads(done.out) == {"model": "m", "spec": "fake", "embeddings": [[3, 0.5], [4, 0.5]]}
    assert model.calls[0] == (["one", "four"], False, "cls", True, "query", 2, "sort")
    assert model.options[0]["name"] == "m"


def test_embed_to_a_file(run, model, tmp_path):
    done = run("embed", "one", "three", "--npy", tmp_path / "out.bin")
    assert (done.code, done.out) == (0, "")
    found = np.load(tmp_path / "out.bin")
    assert (found.dtype, found.tolist()) == (np.float32, [[3, 0.5], [5, 0.5]])
    assert "give --json or --npy, not both" in run("embed", "x", "--json", "--npy", tmp_path / "y").err
    done = run("embed", "x", "--npy", tmp_path / "gone" / "y")
    assert done.code == 1 and done.err.endswith("y: No such file or directory\n") and done.err.count("\n") == 1


@pytest.mark.parametrize("arguments, stdin, complaint", [
    ([], "\n \n", "the input is empty"),
    (["-f", "gone"], None, "gone: No such file")])
def test_no_texts(run, model, arguments, stdin, complaint):
    done = run("embed", *arguments, stdin=stdin)
    assert done.code == 1 and complaint in done.err and model.calls == []


def test_fill_mask(run, model):
    done = run("fill-mask", "a [MASK] b [MASK]", "-m", "m", "--top-k", "1")
    assert done.out.splitlines() == ["gap  probability  word  text", "  1       0.7500  big   a big b [MASK]",
                                     "  2       0.2500  old   a [MASK] b old"]
    assert model.calls[0] == ("a [MASK] b [MASK]", 1)
    found = json.loads(run("fill-mask", "a [MASK] b [MASK]", "-m", "m", "--json").out)
    assert [gap[0]["token"] for gap in found] == ["big", "old"]


@pytest.mark.parametrize("command, own, name, licence", [
    ("fill-mask", "tiny-encoder", "distilbert-base-uncased", "Apache-2.0"),
    ("translate", "tiny-translator", "opus-mt-en-de", "CC-BY-4.0")])
def test_who_names_no_model_gets_the_one_of_numflow_and_is_told_of_another(run, model, command, own, name, licence):
    done = run(command, "x")
    assert done.code == 0 and model.options[0]["name"] == own
    assert done.err.startswith(f"using {own} (") and f"one to download: -m {name} (" in done.err and licence in done.err
    assert run("models").out.count(name) == 1


@pytest.mark.parametrize("check, facts, outputs, told", [
    (ahead.check_masked, "decoder", ("logits",), "it cannot fill gaps; it is for writing text (numflow generate, "
     "numflow chat), distilbert-base-uncased is a model for fill-mask"),
    (ahead.check_masked, "encoder", ("hidden",), "it has no output head; it is for embeddings (numflow embed), d"),
    (ahead.check_translates, "decoder", ("logits",), "it cannot translate; it is for writing text (numflow generate, "
     "numflow chat), opus-mt-en-de is a model for translate"),
    (ahead.check_translates, "encoder", ("logits",), "it cannot translate; it is for filling gaps (numflow fill-mask)"),
    (ahead.check_writes, "encoder", ("hidden",), "it cannot generate text; it is for embeddings (numflow embed)")])
def test_a_model_of_another_kind_is_told_what_it_is_for(check, facts, outputs, told):
    with pytest.raises(RequestError, match=re.escape(told)):
        check(ModelFacts.of(network(type=facts, outputs=outputs)))


def test_fill_mask_reads_standard_input(run, model):
    assert run("fill-mask", "-m", "m", stdin="a [MASK] b\n").code == 0
    assert model.calls[0] == ("a [MASK] b", 5)
    assert "not both" in run("fill-mask", "-m", "m", "a [MASK]", stdin="b [MASK]\n").err
    assert run("fill-mask", "-m", "m", "a [MASK]", stdin="\n").code == 0


@pytest.mark.parametrize("arguments, stdin", [(["one"], "four\n\nfive\n"), (["one", "-f", "FILE"], None)])
def test_no_text_is_dropped(run, model, tmp_path, arguments, stdin):
    file = tmp_path / "texts"
    file.write_text("four\nfive\n")
    run("embed", *(file if a == "FILE" else a for a in arguments), stdin=stdin)
    assert model.calls[0][0] == ["one", "four", "five"]


def test_translate(run, model):
    done = run("translate", "-m", "m", "--from", "en", "--to", "fr", stdin="one\ntwo\n")
    assert (done.code, done.out) == (0, "ONE\nTWO\n")
    assert model.calls[0] == (["one", "two"], "en", "fr", {})
    found = json.loads(run("translate", "-m", "m", "x", "-n", "5", "--num-beams", "2", "--json").out)
    assert found == [{"text": "X", "ids": [1], "finish_reason": "stop", "stats": {}}]
    assert model.calls[2] == (["x"], None, None, {"max_tokens": 5, "num_beams": 2})


def test_experiment(run, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(lab, "list_experiments", lambda: {"speed": "How fast."})
    monkeypatch.setattr(lab, "run_experiment", lambda *arguments: calls.append(arguments) or tmp_path)
    assert run("experiment").out.splitlines()[1].split(maxsplit=1) == ["speed", "How fast."]
    assert run("experiment", "speed", "--quick", "--set", "a=1", "--set", "b=x=y", "--out", "o").out == f"{tmp_path}\n"
    assert [(name, quick, str(out), *more) for name, quick, out, *more in calls] == [
        ("speed", True, "o", {"a": "1", "b": "x=y"}, False)]
    run("experiment", "speed", "--dirty")
    assert calls[1][-1] is True
    assert "needs KEY=VALUE" in run("experiment", "speed", "--set", "a").err
