"""--help, --version and wrong usage, none of which imports anything heavy."""

import subprocess
import sys

import pytest
import typer

import numflow
from numflow.cli import help
from numflow.cli.app import app
from tests.conftest import REPO

HEAVY = ("numpy", "numba", "llvmlite", "gguf", "safetensors", "tokenizers", "sentencepiece", "jinja2",
         "huggingface_hub", "rich", "matplotlib", "torch")
COMMANDS = [info.name for info in app.registered_commands]
SPEC_COMMANDS = ["list", "show", "check", "new"]


@pytest.mark.parametrize("code", [
    "import numflow", "from numflow.cli import main; sys.argv = ['numflow', '--help']; main()",
    "from numflow.cli import main; sys.argv = ['numflow', 'generate', '--help']; main()",
    "from numflow.cli import main; sys.argv = ['numflow', '--version']; main()"])
def test_nothing_heavy_is_imported(code):
    report = f"import atexit, sys; atexit.register(lambda: print('HEAVY', *(m for m in {HEAVY} if m in sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", report + code], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY"


def test_python_m_numflow():
    done = subprocess.run([sys.executable, "-m", "numflow", "--version"], capture_output=True, text=True, cwd=REPO,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"numflow {numflow.__version__}\n", "")


@pytest.mark.parametrize("words", [[], *([c] for c in COMMANDS), ["spec"], *(["spec", c] for c in SPEC_COMMANDS)])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(run, words, flag):
    done = run(*words, flag)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: {' '.join(['numflow', *words])} ")


def test_summaries_are_whole_sentences(run):
    for group in ([], ["spec"]):
        commands = run(*group, "--help").out.split("\n\n", 2)[2]
        assert "..." not in commands


def test_every_command_stands_under_one_heading(run):
    told = [line.split()[0] for line in run("--help").out.split("Write and talk:")[1].splitlines()
            if line.startswith("  ") and not line.startswith(("   ", "  `")) and line.strip()]
    registered = typer.main.get_command(app).commands
    assert sorted(told[:len(registered)]) == sorted(registered)


def test_options_stand_under_headings_once(run):
    out = run("generate", "--help").out
    shown = [heading for heading in help.OPTIONS if f"\n{heading}:\n" in out]
    assert shown == [heading for heading in help.OPTIONS if heading not in ("Listening", "Requests")]  # of services
    sampling = out.split("\nSampling:\n")[1].split("\nConstraints:\n")[0]
    assert "--top-p P" in sampling and "--json-schema" not in sampling
    flags = [line.split()[1 if line.startswith("  -") and not line.startswith("  --") else 0].rstrip(",")
             for line in out.splitlines() if line.startswith("  -")]
    assert len(flags) == len(set(flags)) == sum(
        param.param_type_name == "option" for param in typer.main.get_command(app).commands["generate"].params) + 1
    assert "Sampling:" not in run("pull", "--help").out


def test_the_tables_of_headings_name_what_there_is():
    commands = typer.main.get_command(app).commands
    params = {param.name for command in commands.values() for param in command.params}
    assert {name for names in help.COMMANDS.values() for name in names} <= set(commands)
    assert {name for names in help.OPTIONS.values() for name in names} <= params


@pytest.mark.parametrize("typed, meant", [
    (["list"], ["models"]), (["show", "a"], ["inspect", "a"]), (["bench", "serve", "-x"], ["bench-serve", "-x"]),
    (["run", "a"], ["chat", "-m", "a"]), (["run", "a", "hi"], ["generate", "-m", "a", "hi"]),
    (["run", "a", "--stats"], ["chat", "-m", "a", "--stats"]), (["run"], ["chat"]), (["bench"], ["bench"])])
def test_names_of_commands_elsewhere(typed, meant):
    assert help.meant(typed, terminal=True) == meant


def test_run_from_a_pipe_answers_it():
    assert help.meant(["run", "a", "--raw"], terminal=False) == ["generate", "-m", "a", "--raw"]


@pytest.mark.parametrize("words, complaint", [
    (["generat"], "No such command 'generat'"), (["generate", "--tempreature", "1"], "--tempreature"),
    (["generate", "-n", "many", "x"], "--max-tokens"), (["pull"], "MODEL"), (["spec", "gone"], "gone")])
def test_wrong_usage(run, words, complaint):
    done = run(*words)
    assert done.code == 2
    assert complaint in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("words, found", [
    ("generate -m smollm2-135m-i", ["smollm2-135m-instruct", "smollm2-135m-instruct-bf16"]), ("rm smollm2-135m", [
        "smollm2-135m", "smollm2-135m-instruct", "smollm2-135m-instruct-bf16"]),
    ("serve -m tiny-tr", ["tiny-translator"]), ("run tiny-tr", ["tiny-translator"]), ("show mini", ["minilm"]),
    ("pull ./x", []), ("list x", [])])
def test_a_shell_completes_names_of_models(run, monkeypatch, words, found):
    monkeypatch.setenv("_NUMFLOW_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"numflow {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    done = run()
    assert (done.code, done.out.split(), done.err) == (0, found, "")


def test_a_list_of_models_that_is_broken_completes_nothing(run, monkeypatch, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models.toml").write_text("[x")
    monkeypatch.setenv("_NUMFLOW_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "numflow generate -m tiny")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert (run().out, run().err) == ("\n", "")
