"""`chat` with a model whose answers the test sets: from a pipe, and at a terminal."""

import builtins
import io
import json

import pytest

from numflow.cli.conversation import COMMANDS
from numflow.engine.model import Model

ANSWER = "Hello, wörld 🙂"


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_chat_keeps_the_history(run, loader):
    done = run("chat", "--system", "Be kind", stdin="one\n\n  two\n/reset\nthree\n/exit\nfour\n")
    assert (done.code, done.out, done.err) == (0, f"{ANSWER}\n" * 3, "")
    assert loader.tokenizer.prompts == [
        "<system>Be kind<user>one<assistant>",
        f"<system>Be kind<user>one<assistant>{ANSWER}<user>two<assistant>",
        "<system>Be kind<user>three<assistant>"]


def test_chat_fails_in_a_pipe_at_the_first_line_that_fails(run, loader):
    done = run("chat", stdin="one\n/hlep\ntwo\n")
    assert (done.code, done.out) == (1, f"{ANSWER}\n")
    assert done.err == "error: no command /hlep; did you mean 'help'? (/help explains them)\n"
    done = run("chat", stdin="y" * 600 + "\nshort\n")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "the model's context holds 512: /trim drops the oldest turns" in done.err
    assert "/undo takes no argument" in run("chat", stdin="/undo 3\n").err
    assert "not UTF-8" in run("chat", stdin=b"caf\xe9\n").err
    assert "close the text" in run("chat", stdin='"""one\ntwo\n').err


def test_help_names_every_command(run, loader):
    shown = run("chat", stdin="/help\n/?\n").out
    assert all(shown.count(f"/{word}") >= 2 for word in COMMANDS)


def test_texts_of_several_lines_and_paths(run, loader):
    run("chat", stdin='"""one\n\n  two\n""" \n"""three"""\n/etc/passwd is what?\n')
    users = [prompt.split("<user>")[-1].removesuffix("<assistant>") for prompt in loader.tokenizer.prompts]
    assert users == ["one\n\n  two", "three", "/etc/passwd is what?"]


def test_undo_regen_and_system(run, loader):
    done = run("chat", stdin="one\n/regen\ntwo\n/undo\n/system Be kind\n/system\nthree\n/system \"\"\n/reset\nfour\n")
    assert done.code == 0 and "Be kind\n" in done.out and "(removed: two)" in done.err
    assert loader.tokenizer.prompts == [
        "<user>one<assistant>", "<user>one<assistant>", f"<user>one<assistant>{ANSWER}<user>two<assistant>",
        f"<system>Be kind<user>one<assistant>{ANSWER}<user>three<assistant>", "<user>four<assistant>"]
    for line in ("/undo", "/regen", "/trim"):
        assert run("chat", stdin=line + "\n").code == 1


def test_settings_change_and_are_checked(run, loader, monkeypatch):
    seen, original = [], Model.generate
    monkeypatch.setattr(Model, "generate", lambda self, prompt, **settings: seen.append(settings) or original(
        self, prompt, **settings))
    done = run("chat", "--temperature", "0.5",
               stdin="/set seed=3\none\n/set temperature=\n/set max-tokens=5\ntwo\n/set\n")
    assert done.code == 0 and "max_tokens  5" in done.out
    assert seen == [{"stream": True, "max_tokens": 1024, "temperature": 0.5, "seed": 3},
                    {"stream": True, "max_tokens": 5, "seed": 3}]
    for line, complaint in (("/set n=2", "one answer at a time"), ("/set temperatur=1", "did you mean"),
                            ("/set temperature=-1", "temperature should be"), ("/set x", "NAME=VALUE")):
        done = run("chat", stdin=line + "\n")
        assert done.code == 1 and complaint in done.err


def test_a_conversation_is_saved_and_loaded(run, loader, tmp_path):
    file = tmp_path / "talk.json"
    assert run("chat", "--system", "Be kind", stdin=f"one\n/save {file}\n/save {file}\n").code == 0
    assert [m["role"] for m in json.loads(file.read_text("utf-8"))["messages"]] == ["system", "user", "assistant"]
    run("chat", stdin=f"/load {file}\ntwo\n")
    assert loader.tokenizer.prompts[-1] == f"<system>Be kind<user>one<assistant>{ANSWER}<user>two<assistant>"
    (tmp_path / "other").write_text("precious")
    (tmp_path / "turns").write_text('[{"role": "assistant", "content": "x"}]')
    (tmp_path / "roles").write_text('{"messages": [{"role": "god", "content": "x"}]}')
    for line in ("/save other", "/load other", "/load turns", "/load roles", "/load gone", "/save no/folder", "/save"):
        word, _, name = line.partition(" ")
        done = run("chat", stdin=f"{word} {tmp_path / name if name else ''}\n")
        assert (done.code, done.err.count("\n")) == (1, 1), line
    assert (tmp_path / "other").read_text() == "precious"


def test_files_go_with_the_next_question(run, loader, tmp_path):
    (tmp_path / "a.md").write_text("x\n```\ny\n")
    (tmp_path / "b.bin").write_bytes(b"\xff")
    with open(tmp_path / "large", "w") as file:
        file.truncate(1_000_001)
    done = run("chat", stdin=f"/attach {tmp_path}/a.md\nsum up\ngo on\n/attach\n")
    assert (done.code, "no file is attached to the next question" in done.err) == (0, True)
    first, second = loader.tokenizer.prompts
    assert first == "<user>sum up\n\na.md:\n````\nx\n```\ny\n````<assistant>"
    assert second.endswith("<user>go on<assistant>") and second.count("a.md") == 1
    assert "a.md" not in run("chat", stdin=f'/attach {tmp_path}/a.md\n/attach ""\none\n').out
    assert loader.tokenizer.prompts[-1] == "<user>one<assistant>"
    for name, complaint in (("b.bin", "not UTF-8"), ("gone", "No such file"), ("large", "1000001 bytes"),
                            ("", "not a file"), ("x" * 300, "File name too long")):
        done = run("chat", stdin=f"/attach {tmp_path}/{name}\n")
        assert (done.code, done.err.count("\n")) == (1, 1) and complaint in done.err


def test_thinking_is_shown_but_no_part_of_the_conversation(run, loader):
    loader.answer = b"<think>\nto greet\n</think>\n\nHi"
    done = run("chat", stdin="/think\none\n/think\ntwo\n")
    text = loader.answer.decode()
    assert (done.code, done.out) == (0, f"(no thinking)\n{text}\nto greet\n{text}\n")  # in a pipe, unchanged
    assert loader.tokenizer.prompts[-1] == "<user>one<assistant>Hi<user>two<assistant>"


def test_a_template_that_begins_the_thinking(run, loader, monkeypatch):
    loader.answer = b"to greet</think>Hi"
    kind, original = type(loader.tokenizer), type(loader.tokenizer).apply_chat
    monkeypatch.setattr(kind, "apply_chat", lambda self, messages: original(self, messages) + "<think>")
    done = run("chat", stdin="one\n/think\ntwo\n")
    assert done.out.splitlines()[1] == "to greet" and "<assistant>Hi<user>two" in loader.tokenizer.prompts[-1]


def test_another_model_goes_on_with_the_conversation(run, loader):
    done = run("chat", "-m", "first", stdin="one\n/model\n/model second\ntwo\n")
    assert done.code == 0 and [given["name"] for given in loader.options] == ["first", "second"]
    assert "model            first" in done.out and "model            second" in done.out
    assert loader.tokenizer.prompts[-1] == f"<user>one<assistant>{ANSWER}<user>two<assistant>"
    assert [program.closed for program in loader.programs] == [True, True]


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(run, loader, terminal, monkeypatch):
    from numflow.errors import ModelNotFoundError

    def load(name, **options):
        if name == "gone":
            raise ModelNotFoundError("no model gone")
        return loader(name, **options)

    monkeypatch.setattr("numflow.load", load)
    terminal("/model gone", "one")
    done = run("chat", "-m", "first")
    assert (done.code, done.out) == (0, f"{ANSWER}\n") and "error: no model gone" in done.err


def test_stats_of_a_conversation(run, loader):
    done = run("chat", stdin="/stats\none\n/stats\n")
    assert "(no answer yet)" in done.out and "tok/s" in done.out and "of 512 tokens, 1 turn" in done.out


def test_the_oldest_turns_are_dropped_on_request(run, loader):
    stdin = "".join(f"{n}{'x' * 150}\n" for n in range(4))
    done = run("chat", "-n", "20", stdin=stdin)
    assert done.code == 1 and "/trim" in done.err
    done = run("chat", "-n", "20", "--trim", stdin=stdin)
    assert done.code == 0 and done.out == f"{ANSWER}\n" * 4 and "(the oldest 1 of 2 turns are dropped)" in done.err
    assert all(len(prompt) <= 512 for prompt in loader.tokenizer.prompts if prompt.count("<user>") <= 2)
    assert loader.tokenizer.prompts[-1].startswith("<user>2x")


def test_chat_takes_strategies(run, loader):
    loader.answer = b"abababababababab"
    done = run("chat", "--decoding", "fsd", "--speculate", "ngram", "--set", "stop_token_ids=[98]", stdin="x\n")
    assert (done.code, done.out) == (0, "a\n")
    done = run("chat", "--set", "n=2", stdin="x\n")
    assert (done.code, done.err.count("\n")) == (1, 1) and "one answer at a time" in done.err


def test_chat_needs_a_template(run, loader):
    loader.tokenizer.chat_template = None
    done = run("chat", stdin="x\n")
    assert (done.code, done.err) == (1, "error: fake has no chat template; `numflow generate` continues text with it\n")


@pytest.fixture
def terminal(monkeypatch):
    """Standard input is a terminal at which these lines are typed; an exception in the list is raised instead."""
    def type_lines(*lines):
        left = list(lines)

        def answer(prompt):
            if not left:
                raise EOFError
            if isinstance(left[0], BaseException):
                raise left.pop(0)
            return left.pop(0)

        monkeypatch.setattr("io.TextIOWrapper", Terminal)
        monkeypatch.setattr(builtins, "input", answer)

    return type_lines


def test_chat_goes_on_after_a_question_that_is_too_long(run, loader, terminal):
    terminal("y" * 600, "short")
    done = run("chat")
    assert done.code == 0
    assert done.err.splitlines()[1].startswith("error: ") and "context" in done.err
    assert loader.tokenizer.prompts[-1] == "<user>short<assistant>"


def test_trim_answers_the_question_that_had_no_room(run, loader, terminal):
    terminal("one" * 70, "two" * 70, "three", "/trim")
    done = run("chat", "-n", "20")
    assert done.code == 0 and done.out == f"{ANSWER}\n" * 3
    assert loader.tokenizer.prompts[-1].endswith("<user>three<assistant>")


def test_pasted_lines_are_one_question(run, loader, terminal):
    terminal("/undo\nis a command\nof chat")
    run("chat")
    assert loader.tokenizer.prompts == ["<user>/undo\nis a command\nof chat<assistant>"]


def interrupted(loader, monkeypatch, at):
    """The first answer is interrupted when its history has more than `at` tokens."""
    original, done = type(loader)._next, []

    def interrupt(self, history):
        if len(history) > at and not done:
            done.append(True)
            raise KeyboardInterrupt
        return original(self, history)

    monkeypatch.setattr(type(loader), "_next", interrupt)


def test_ctrl_c_in_chat_stops_the_answer_only(run, loader, terminal, monkeypatch):
    terminal("one", "two")
    interrupted(loader, monkeypatch, 25)
    done = run("chat")
    assert (done.code, done.out) == (0, f"Hello\n{ANSWER}\n")
    assert loader.tokenizer.prompts[-1] == "<user>one<assistant>Hello<user>two<assistant>"


def test_ctrl_c_before_the_first_word_takes_the_question_back(run, loader, terminal, monkeypatch):
    terminal("one", "two")
    interrupted(loader, monkeypatch, 0)
    done = run("chat")
    assert done.code == 0 and "the question is removed" in done.err
    assert loader.tokenizer.prompts[-1] == "<user>two<assistant>"


def test_ctrl_c_from_a_pipe_ends_chat(run, loader, monkeypatch):
    interrupted(loader, monkeypatch, 25)
    assert run("chat", stdin="one\ntwo\n").code == 130


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_leaves(run, loader, terminal):
    terminal(KeyboardInterrupt(), "one", KeyboardInterrupt(), KeyboardInterrupt(), "two")
    done = run("chat")
    assert (done.code, done.out) == (130, f"{ANSWER}\n")
    assert "Ctrl-C again or Ctrl-D exits" in done.err


def test_ctrl_c_leaves_a_text_of_several_lines(run, loader, terminal):
    terminal('"""one', KeyboardInterrupt(), "two")
    assert run("chat").code == 0
    assert loader.tokenizer.prompts == ["<user>two<assistant>"]


def test_a_session_goes_on_where_it_was_left(run, loader, tmp_path):
    path = tmp_path / "talk.session"
    assert run("chat", "--system", "Be kind", "--session", str(path), stdin="one\n").code == 0
    done = run("chat", "--session", str(path), stdin="two\n")
    assert (done.code, done.out, done.err) == (0, f"{ANSWER}\n", "(1 turn)\n")
    assert loader.tokenizer.prompts[-1] == f"<system>Be kind<user>one<assistant>{ANSWER}<user>two<assistant>"
    done = run("chat", "--session", str(path), stdin="/undo\n")
    assert done.code == 0 and "(2 turns)" in done.err and "(2 turns)" in run(
        "chat", "--session", str(path), stdin="").err  # without an answer, no file is written
    path.write_bytes(b"x" * 50)
    done = run("chat", "--session", str(path), stdin="two\n")
    assert (done.code, done.out) == (1, "") and done.err.startswith(f"error: {path}: ") and done.err.count("\n") == 1
    assert "no folder" in run("chat", "--session", str(tmp_path / "no" / "x"), stdin="two\n").err
    assert "File name too long" in run("chat", "--session", str(tmp_path / ("x" * 300)), stdin="two\n").err
