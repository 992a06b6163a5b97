"""Groups of options: one class, expanded into options on every command that takes it."""

import inspect

import numflow
from numflow.cli.bench import bench
from numflow.cli.generate import generate
from numflow.cli.groups import Execution, SamplingOptions, grouped


def test_a_group_becomes_its_options_and_comes_back_as_one():
    seen = []

    @grouped
    def command(prompt: str, how: Execution = Execution(), json: bool = False) -> None:  # noqa: B008
        """Words."""
        seen.append((prompt, how, json))

    names = list(inspect.signature(command).parameters)
    assert names[:2] == ["prompt", "threads"] and names[-1] == "json" and "how" not in names
    defaults = {name: p.default for name, p in inspect.signature(command).parameters.items() if name != "prompt"}
    command(prompt="a", **defaults | {"threads": 3, "kv": "q8"})
    assert seen == [("a", Execution(threads=3, kv="q8"), False)]


def test_every_field_is_an_argument_of_load():
    own = {"host_embeddings", "host_kv_percent", "collectives"}  # options for GPUs
    given = Execution(host_embeddings=True, host_kv_percent=50.0, cpu_layers=2, collectives="copies").arguments()
    assert set(given) <= set(inspect.signature(numflow.load).parameters) | own
    assert not {*own, "cpu_layers"} & set(Execution().arguments())


def test_only_what_was_given_is_a_setting():
    assert SamplingOptions().settings() == {}
    assert SamplingOptions(top_k=4, set_=["n=2"]).settings(stop=["x"]) == {"top_k": 4, "n": 2, "stop": ["x"]}


def test_the_processor_compiles_unless_a_gpu_runs_all():
    assert Execution().compiles and Execution(backend="cuda", devices="cpu;0").compiles
    assert Execution(backend="cuda", cpu_layers=1).compiles and not Execution(backend="cuda", devices="0;1").compiles


def test_commands_have_the_options_once():
    for command in (generate, bench):
        names = list(inspect.signature(command).parameters)
        assert len(names) == len(set(names)) and {"weights", "kv_k", "devices", "offline"} <= set(names)
