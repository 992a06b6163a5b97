"""The table of options: Python, the shell and the service's configuration agree, and a default is written once."""

import ast
import inspect
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import typer

import numflow
from numflow.cli.app import app
from numflow.cli.groups import Execution
from numflow.engine import options
from numflow.engine.load import BACKENDS, load
from numflow.engine.options import COMMANDS, CONFIG, EngineOptions, LoadOptions, in_shell, rows
from numflow.engine.schedule.limits import BATCHING, PREEMPTION, StepLimits
from numflow.errors import NumflowError, RequestError, option
from numflow.network.windows import CHUNK
from numflow.quant.kv import KV_TYPES
from numflow.server.config.config import make_config
from numflow.server.config.options import MODEL, in_config
from numflow.server.models.served import Served
from tests.conftest import REPO
from tests.engine.tiny import write_checkpoint

TABLES = [(LoadOptions, load, "load"), (EngineOptions, numflow.Engine, "engine")]
ALL = {row.name for table, *_ in TABLES for row, _ in rows(table)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@cache
def flags(command: str) -> dict:
    """Options of a command by name, as the shell knows them."""
    return {found.name: found for found in typer.main.get_command(app).commands[command].params}


@pytest.mark.parametrize(("table", "owner", "goes"), TABLES, ids=["load", "engine"])
def test_python_and_the_configuration_are_the_table(table, owner, goes):
    taken = inspect.signature(owner).parameters
    for row, _ in rows(table):
        assert taken[row.name].default == row.default and f"\n    {row.name}: " in owner.__doc__
    assert {name for name, one in MODEL.items() if one.goes == goes} == {row.name for row, _ in rows(table, CONFIG)}
    for row, found in rows(table, CONFIG):
        one = MODEL[row.name]
        assert (one.default, one.help, one.aliases) == (row.default, found.help_for(in_config), found.aliases)


def test_the_shell_is_the_table():
    for command in ("generate", "bench", "perplexity", "warmup"):
        shown = flags(command)
        for row, found in rows(LoadOptions, COMMANDS):
            one = shown[row.name]
            assert (one.opts, one.default, one.help) == ([in_shell(row.name)], row.default, found.help_for(in_shell))
    shown = flags("serve")
    for name in {row.name for row, _ in rows(LoadOptions, COMMANDS)} - {"imatrix", "transport", "offline"}:
        assert (shown[name].opts, shown[name].default) == ([in_shell(name)], None)
    assert shown["cpu_layers"].show_default == "0" and shown["devices"].show_default == "one device"


def test_arguments_of_a_command_are_those_that_differ():
    assert Execution().arguments() == {}
    assert Execution(backend="cuda", cpu_layers=2, transport="ray").arguments() == {
        "backend": "cuda", "cpu_layers": 2, "transport": "ray"}


def test_executors_and_schedulers_have_the_same_values():
    for name, module in BACKENDS.items():
        taken = inspect.signature(import_module(module).Program).parameters
        for row, found in rows(LoadOptions):
            assert not found.of or row.name == "cpu_layers" or (name in found.of) == (row.name in taken)
            if found.of and row.name in taken:
                assert taken[row.name].default == (row.default if row.default is not None else found.shown)
    assert options.KV == KV_TYPES
    assert LoadOptions.chunk == EngineOptions.max_step_tokens == CHUNK == StepLimits().chunk == StepLimits().tokens
    assert (StepLimits().sequences, StepLimits().batching, StepLimits().preemption) == (
        EngineOptions.max_batch, EngineOptions.batching, EngineOptions.preemption)
    for word in (*BATCHING, *PREEMPTION):
        options.check(replace(EngineOptions(), **{"batching" if word in BATCHING else "preemption": word}))


INTERFACES = ("cli/groups.py", "cli/options.py", "cli/serve.py", "server/config/options.py", "engine/load.py",
              "engine/engine.py", "engine/options.py")


@cache
def said() -> dict[str, set[str]]:
    """Names of fields, parameters and keys, and flags, by file."""
    found = {}
    for path in sorted((REPO / "numflow").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        fields_ = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
        names = [node.id for node in fields_ if isinstance(node, ast.Name)]
        names += [node.arg for node in nodes if isinstance(node, ast.arg) and node.annotation is not None]
        texts = [node for table in nodes if isinstance(table, ast.Dict) for node in table.keys]
        names += [node.value for node in texts if isinstance(node, ast.Constant)]
        names += [node.value for node in nodes if isinstance(node, ast.Constant) and str(node.value).startswith("--")]
        found[path.relative_to(REPO / "numflow").as_posix()] = {name for name in names if isinstance(name, str)}
    return found


def declared(name: str) -> list[str]:
    """Files that say an option's type, default, help or flag: where it is a field, a parameter, a key or a flag."""
    return [file for file, names in said().items() if names & {name, in_shell(name)}]


def test_an_option_stands_in_two_places_at_most():
    for name in ALL - {"max_queue"}:  # the service has an option of that name too, with a default of its own
        assert len([place for place in declared(name) if place in INTERFACES]) <= 2, name
    assert declared("host_kv_percent") == ["cuda/program.py", "engine/options.py"]


def test_messages_are_written_for_their_reader(folder, capsys):
    with pytest.raises(RequestError) as caught:
        load(folder, backend="reference", transport="processes")
    assert str(caught.value) == "transport='processes' is between devices: name them with devices='0;1'"
    assert "--transport processes is between devices: name them with --devices '0;1'" in wrong(
        capsys, "generate", "-m", str(folder), "--transport", "processes", "x")
    config = make_config({"models": {"m": {"path": str(folder), "device": "reference", "transport": "processes"}}})
    with pytest.raises(RequestError, match=r"^\[models.m\] transport = 'processes' is between devices: name "):
        Served(config.models[0], 5)
    every = make_config({"engine": {"imatrix": "x"}}, models={"m": {"path": str(folder)}})
    with pytest.raises(RequestError, match=r"^\[engine\] imatrix helps quantising: say with weights what"):
        Served(every.models[0], 5)


def test_settings_are_named_as_the_command_takes_them(folder, capsys):
    begin = ("generate", "-m", str(folder), "--device", "reference", "--raw")
    assert "error: --temperature should be" in wrong(capsys, *begin, "--temperature", "-1", "x")
    assert "error: --set mirostat should be" in wrong(capsys, *begin, "--set", "mirostat=9", "x")
    assert "--speculate draft needs a draft model: name one with --draft" in wrong(
        capsys, *begin, "--speculate", "draft", "x")
    assert "error: --kv should be one of auto, f32" in wrong(capsys, *begin, "--kv", "q7", "x")


def wrong(capsys, *words: str) -> str:
    """Standard error of a command that fails."""
    with pytest.raises(SystemExit) as end:
        app(list(words), prog_name="numflow")
    assert end.value.code == 1
    return " ".join(capsys.readouterr().err.split())


def test_options_in_messages():
    error = NumflowError(f"{option('cpu_layers', 2)} and {option('backend')}, \x01 as it was")
    assert str(error) == "cpu_layers=2 and backend, \x01 as it was"
    assert error.spelled(in_shell) == "--cpu-layers 2 and --device, \x01 as it was"
    error.respell(lambda name, value: in_config(name, value) if name == "backend" else None)
    assert str(error) == "cpu_layers=2 and backend, \x01 as it was" and "\x02" in error.args[0]
    assert in_shell("devices", "'0;1'") == "--devices '0;1'" and in_shell("kv", "'q8'") == "--kv q8"


@pytest.mark.parametrize(("given", "said"), [
    ({"threads": True}, "threads should be a whole number from 1, is True"),
    ({"chunk": "8"}, "chunk should be a whole number from 1"), ({"weights": 4}, "weights should be text"),
    ({"offline": 1}, "offline should be true or false"), ({"cpu_layers": "2"}, "cpu_layers should be a whole number"),
    ({"contxt": 4}, "no option 'contxt'; did you mean 'context'"),
    ({"activations": None}, "activations should be one")])
def test_values_of_another_kind(folder, given, said):
    with pytest.raises(RequestError, match=said):
        load(folder, backend="reference", **given)


def test_the_table_is_light():
    code = "import sys, numflow; before = set(sys.modules); import numflow.engine.options\n" \
        "print(*sorted(set(sys.modules) - before - {'numflow.engine', 'numflow.engine.options'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    heavy = [name for name in done.stdout.split() if name.split(".")[0] in ("numpy", "typer", "numflow", "typing")]
    assert heavy == []
