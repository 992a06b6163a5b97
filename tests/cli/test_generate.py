"""`generate` and `chat` with a model whose answers the test sets."""

import dataclasses
import inspect
import io
import json
import re

import numpy as np
import pytest

from numflow.cli.chat import chat
from numflow.cli.generate import generate
from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.request.request import Settings
from numflow.engine.run.walk import Guess, Values, Walk
from numflow.executor.contract import TraceRow
from tests.engine.fake import EOS, VOCABULARY

ANSWER = "Hello, wörld 🙂"


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_text_goes_to_standard_output_alone(run, loader):
    done = run("generate", "Say hello")
    assert (done.code, done.out, done.err) == (0, ANSWER + "\n", "")
    assert loader.tokenizer.prompts == ["<user>Say hello<assistant>"]
    assert loader.programs[0].closed


def test_raw_and_models_without_a_template_continue(run, loader):
    run("generate", "--raw", "Say hello")
    loader.tokenizer.chat_template = None
    run("generate", "Say hello")
    assert loader.tokenizer.prompts == ["Say hello", "Say hello"]


@pytest.mark.parametrize("arguments, stdin", [
    (["from anywhere"], None), (["-f", "FILE"], None), ([], "from anywhere\n"), (["-"], "from anywhere"),
    (["-f", "-"], "from anywhere\n")])
def test_where_a_prompt_comes_from(run, loader, tmp_path, arguments, stdin):
    file = tmp_path / "prompt.txt"
    file.write_text("from anywhere\n", encoding="utf-8")
    done = run("generate", "--raw", *(str(file) if a == "FILE" else a for a in arguments), stdin=stdin)
    assert done.code == 0
    assert loader.tokenizer.prompts == ["from anywhere"]


@pytest.mark.parametrize("arguments, stdin", [
    (["Sum up:"], "the text\n"), (["Sum up:", "-f", "FILE"], None), (["Sum up:", "-f", "FILE"], "something else"),
    (["Sum up:", "-f", "-"], "the text")])
def test_an_instruction_goes_above_the_text(run, loader, tmp_path, arguments, stdin):
    file = tmp_path / "text"
    file.write_text("the text\n", encoding="utf-8")
    assert run("generate", "--raw", *(str(file) if a == "FILE" else a for a in arguments), stdin=stdin).code == 0
    assert loader.tokenizer.prompts == ["Sum up:\n\nthe text"]


@pytest.mark.parametrize("stdin", [b"", b" \n\n"])
def test_an_empty_input_changes_nothing(run, loader, stdin):
    run("generate", "--raw", "Sum up:", stdin=stdin)
    assert loader.tokenizer.prompts == ["Sum up:"]


def test_a_system_message(run, loader):
    run("generate", "--system", "Be brief.", "Say hello")
    assert loader.tokenizer.prompts == ["<system>Be brief.<user>Say hello<assistant>"]
    assert "--system has no effect with --raw" in run("generate", "--raw", "--system", "Be brief.", "x").err
    loader.tokenizer.chat_template = None
    done = run("generate", "--system", "Be brief.", "x")
    assert done.code == 1 and "has no chat template: leave --system out" in done.err


@pytest.mark.parametrize("arguments, stdin, complaint", [
    (["-f", "gone.txt"], None, "gone.txt: No such file"),
    ([], b"caf\xe9", "standard input: not UTF-8 text (byte 3)"),
    (["x", "-n", "-1"], None, "--max-tokens should be"),
    (["x", "--temperature", "-1"], None, "--temperature should be"),
    (["y" * 600], None, "context")])
def test_bad_requests_are_one_line(run, loader, arguments, stdin, complaint):
    done = run("generate", *arguments, stdin=stdin)
    assert (done.code, done.out.strip()) == (1, "")
    assert done.err.startswith("error: ") and complaint in done.err and done.err.count("\n") == 1


def test_no_prompt_on_a_terminal(run, loader, monkeypatch):
    monkeypatch.setattr("io.TextIOWrapper", Terminal)
    done = run("generate")
    assert done.code == 1
    assert done.err == 'error: no prompt: numflow generate "..." (or -f FILE, or text on standard input)\n'


def test_json(run, loader):
    done = run("generate", "--json", "x")
    found = json.loads(done.out)
    assert found["text"] == ANSWER and bytes(found["ids"]).decode() == ANSWER
    assert (found["finish_reason"], found["model"], found["spec"]) == ("stop", "smollm2-135m-instruct", "fake")
    assert found["stats"]["new_tokens"] == len(found["ids"])
    assert {"prefill_tok_s", "decode_tok_s", "first_token_s", "load_s"} <= found["stats"].keys()


def test_stats_go_to_standard_error(run, loader):
    done = run("generate", "--stats", "-n", "5", "x")
    assert done.out == "Hello\n"
    assert done.err.startswith("prompt 19 tokens in ") and ", 5 new in " in done.err and "by length" in done.err


def test_one_token_has_no_speed(run, loader):
    done = run("generate", "--stats", "-n", "1", "x")
    assert ", 1 new, loaded in" in done.err


def test_options_reach_the_library(run, loader):
    run("generate", "x", "-m", "some/model", "--device", "reference", "--threads", "3", "--spec", "s.toml",
        "--activations", "f32", "--offline", "--weights", "q3h", "--imatrix", "i.st")
    wanted = {"name": "some/model", "backend": "reference", "threads": 3, "spec": "s.toml", "activations": "f32",
              "offline": True, "weights": "q3h", "imatrix": "i.st"}
    assert loader.options[0].items() >= wanted.items()


def test_sampling_reaches_the_library(run, loader, monkeypatch):
    seen = {}
    original = Model.generate

    def spy(self, prompt, max_tokens, **settings):
        seen.update(settings, max_tokens=max_tokens)
        return original(self, prompt, max_tokens, **settings)

    monkeypatch.setattr(Model, "generate", spy)
    run("generate", "x", "-n", "7", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1",
        "--seed", "11")
    assert seen == {"max_tokens": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 11,
                    "chat": True, "stream": True}
    seen.clear()
    run("generate", "x", "--decoding", "sample.top_p", "--set", "seed=3", "--set", "n=2", "--stop", "a", "--stop", "b",
        "--repetition-penalty", "1.2", "--speculate", "ngram", "--logprobs", "1")
    assert seen == {"max_tokens": 256, "decoding_alg": "sample.top_p", "seed": 3, "n": 2, "stop": ["a", "b"],
                    "repetition_penalty": 1.2, "speculate": "ngram", "logprobs": 1, "chat": True, "stream": False}


def test_several_texts(run, loader):
    done = run("generate", "x", "--temperature", "1", "--set", "n=2")
    assert done.out == f"[1]\n{ANSWER}\n\n[2]\n{ANSWER}\n"
    found = json.loads(run("generate", "x", "--temperature", "1", "--set", "n=2", "--json", "--logprobs", "2").out)
    assert [one["text"] for one in found["choices"]] == [ANSWER, ANSWER] == [found["text"]] * 2
    assert [one["id"] for one in found["logprobs"]] == found["ids"]
    assert [one["top"][0]["id"] for one in found["logprobs"]] == found["ids"]
    assert "".join(one["text"] for one in found["logprobs"][:5]) == "Hello"
    assert [one["top"][0]["text"] for one in found["logprobs"][:5]] == list("Hello")
    beams = json.loads(run("generate", "x", "--set", "num_beams=2", "--json").out)
    assert beams["text"] == ANSWER and beams["score"] < 0


@pytest.mark.parametrize("arguments, complaint", [
    (["--set", "n"], "--set needs NAME=VALUE, got 'n'"), (["--set", "top_k=3", "--top-k", "4"], "top_k is given twice"),
    (["--set", "n=x"], "n should be a whole number"), (["--regex", "@gone.txt"], "gone.txt: No such file"),
    (["--set", "temprature=1"], "did you mean 'temperature'"), (["--speculate", "draft"], "needs a draft model"),
    (["--decoding", "random_fsd", "--set", "temperature=0"], "give a temperature above 0")])
def test_wrong_settings_are_one_line(run, loader, arguments, complaint):
    done = run("generate", "x", *arguments)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert complaint in done.err


def test_a_draft_model_reaches_the_library(run, loader):
    run("generate", "x", "--draft", "small")
    assert loader.options[0]["draft"] == "small"


def test_guesses_are_counted(run, loader):
    loader.answer = b"abcdefgh" * 8
    done = run("generate", "--stats", "--speculate", "ngram", "--set", "draft_tokens=4", "x")
    assert done.out == "abcdefgh" * 8 + "\n"
    right, drafts = map(int, re.search(r"(\d+) of (\d+) drafts accepted", done.err).groups())
    assert 20 < right <= drafts


@pytest.mark.parametrize("command", [generate, chat])
def test_defaults_are_the_librarys(command):
    """Except max_tokens, since a user at a terminal wants the whole answer. Sampling defaults are the model's."""
    library = {name: parameter.default for name, parameter in inspect.signature(load).parameters.items()}
    library |= {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, parameter in inspect.signature(command).parameters.items():
        name = {"device": "backend"}.get(name, name)
        if name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            assert parameter.default is None, name
        elif name in library and name not in ("max_tokens", "prompt"):
            assert parameter.default == library[name], name


def test_what_has_no_effect_is_a_line_on_standard_error(run, loader):
    done = run("generate", "x", "--temperature", "0", "--top-p", "0.9", "--set", "mirostat_tau=3")
    assert (done.code, done.out) == (0, f"{ANSWER}\n")
    assert done.err.splitlines() == [
        "ignored: top_p=0.9 has no effect at temperature 0, which is greedy; give a temperature above 0",
        "ignored: mirostat_tau=3 has no effect without mirostat"]
    done = run("generate", "x", "--raw", "--top-p", "0.9")
    assert done.code == 0 and done.err.startswith("ignored: top_p=0.9 has no effect at temperature 0")
    assert run("generate", "x", "--top-p", "0.9").err == ""


def test_a_conversation_is_drawn_and_its_seed_told(run, loader, monkeypatch):
    rows = np.random.default_rng(0).standard_normal((600, VOCABULARY))
    rows[:, 128:] = -50
    monkeypatch.setattr(type(loader), "_next", lambda self, history: rows[len(history)])
    first, second = (json.loads(run("generate", "x", "--json", "-n", "40").out) for _ in range(2))
    again = run("generate", "x", "-n", "40", "--seed", first["seed"], "--stats")
    assert first["text"] != second["text"] and again.out == first["text"] + "\n"
    assert again.err.rstrip().endswith(f", seed {first['seed']}")
    for greedy in (["--temperature", "0"], ["--raw"], ["--decoding", "greedy"]):
        texts = [json.loads(run("generate", "x", "--json", "-n", "40", *greedy).out) for _ in range(2)]
        assert texts[0]["text"] == texts[1]["text"] and texts[0]["seed"] is None


def test_a_seed_repeats(run, loader, monkeypatch):
    rows = np.random.default_rng(0).standard_normal((600, VOCABULARY))
    rows[:, 128:] = -50
    monkeypatch.setattr(type(loader), "_next", lambda self, history: rows[len(history)])
    texts = [run("generate", "x", "--temperature", "1", "--seed", str(seed)).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_ctrl_c_keeps_what_was_written(run, loader, monkeypatch):
    original = type(loader)._next

    def interrupt(self, history):
        if len(history) > 23:
            raise KeyboardInterrupt
        return original(self, history)

    monkeypatch.setattr(type(loader), "_next", interrupt)
    done = run("generate", "x")
    assert (done.code, done.out, done.err) == (130, "Hello\n", "interrupted\n")
    assert loader.programs[0].closed


ROWS = [TraceRow(0, "token_embd", "embed", "[1] -> [1, 4]", "numflow/cpu/embed.py:12", 1.25),
        TraceRow(1, "norm", "rms_norm", "[1, 4] -> [1, 4]", "numflow/cpu/linear.py:345", 0.0, 2),
        TraceRow(2, "output", "linear", "[1, 4] -> [1, 9]", "numflow/cpu/linear.py:345", 1000.0)]


@pytest.fixture
def walked(monkeypatch):
    """Records the prompts that were explored, with a model that always returns the same walk."""
    seen = []
    walk = Walk("a\nb", True, [(5, "a"), (6, "\nb")], ROWS, {0: Values(-1.0, 2.5, 0.75, True)},
                [Guess(7, " <c>", 0.5)], [[Guess(8, "d", 0.25)]], np.array([[1.0, -2.0]], np.float32))
    monkeypatch.setattr(Model, "walk", lambda self, prompt, chat, lens: seen.append((prompt, chat, lens)) or walk)
    return seen


def test_trace_prints_the_walk_of_a_token(run, loader, walked):
    lines = run("generate", "--trace", "x").out.splitlines()
    assert lines[:3] == [r'text  "a\nb"  template: applied', r'ids   5 "a" 6 "\nb"',
                         "steps of the last token, position 1"]
    assert lines[4:8] == [
        "#  label       op        shapes            min  max   rms      µs  kernel",
        "0  token_embd  embed     [1] -> [1, 4]      -1  2.5  0.75     1.2  numflow/cpu/embed.py:12",
        "1  norm        rms_norm  [1, 4] -> [1, 4]    -    -     -       -  in step 2 (fused)",
        "2  output      linear    [1, 4] -> [1, 9]    -    -     -  1000.0  numflow/cpu/linear.py:345"]
    assert lines[8].startswith("3 steps, 1.001 ms")
    assert lines[9:] == ['after layer 0:  "d" 25.0 %', 'likeliest:  " <c>" 50.0 %']
    found = json.loads(run("generate", "--trace", "--json", "--raw", "--lens", "x").out)
    assert [(row["op"], row["within"]) for row in found["steps"]] == [("embed", None), ("rms_norm", 2),
                                                                      ("linear", None)]
    assert found["best"] == [{"id": 7, "text": " <c>", "probability": 0.5}] and found["steps"][1]["values"] is None
    assert walked == [("x", True, False), ("x", False, True)]


def test_a_trace_as_a_page(run, loader, walked, tmp_path):
    assert run("generate", "--trace", "--html", tmp_path / "walk.html", "x").code == 0
    page = (tmp_path / "walk.html").read_text(encoding="utf-8")
    assert "def rms_norm(" in page and "&lt;c&gt;" in page and "<c>" not in page and page.count("<details") == 3
    assert "://" not in page.replace("arXiv", "")
    done = run("generate", "--html", tmp_path / "x", "x")
    assert done.code == 1 and "--html needs --trace" in done.err
    done = run("generate", "--trace", "--html", tmp_path / "gone" / "x", "x")
    assert done.code == 1 and done.err.endswith("No such file or directory\n")


@pytest.mark.parametrize("arguments", [
    ["-n", "7"], ["--temperature", "0.5"], ["--stop", "x"], ["--logprobs", "3"], ["--stats"], ["--draft", "m"],
    ["--regex", "a"]])
def test_trace_ignores_no_option(run, loader, arguments):
    done = run("generate", "--trace", *arguments, "x")
    assert done.code == 1 and "has no effect" in done.err and loader.options == []


def test_an_empty_answer_is_an_empty_line(run, loader):
    loader.answer = [EOS]
    assert run("generate", "x").out == "\n"
