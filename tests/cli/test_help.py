"""--help, --version and wrong usage; and that none of them loads anything heavy."""

import subprocess
import sys

import pytest

import numflow
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
        commands = run(*group, "--help").out.split("Commands:")[1]
        assert "..." not in commands


@pytest.mark.parametrize("words, complaint", [
    (["generat"], "No such command 'generat'"), (["generate", "--tempreature", "1"], "--tempreature"),
    (["generate", "-n", "many", "x"], "--max-tokens"), (["pull"], "MODEL"), (["spec", "gone"], "gone")])
def test_wrong_usage(run, words, complaint):
    done = run(*words)
    assert done.code == 2
    assert complaint in done.err and "Traceback" not in done.err
