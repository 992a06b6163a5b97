"""Placements on the command line: drawn by `inspect`, refused in one line."""

import json

import pytest

from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def _numflow(capsys, *args):
    from numflow.cli.app import app

    try:
        app([str(arg) for arg in args], prog_name="numflow")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


def test_inspect_draws_the_placement(folder, capsys):
    code, out, _ = _numflow(capsys, "inspect", folder, "--devices", "0&1;2", "--json")
    whole = json.loads(_numflow(capsys, "inspect", folder, "--json")[1])
    assert code == 0
    first, second, third = json.loads(out)["devices"]
    assert first["layers"] == second["layers"] == {"": [0, 0]} and third["layers"] == {"": [1, 1]}
    assert first["ops"]["all_reduce"] == 3 and first["ops"]["send"] == third["ops"]["receive"] == 1
    norms = 4 * 32 * 2  # bytes that both devices of the first group have
    stored = sum(device["stored_bytes"] for device in (first, second, third))
    assert stored == whole["stored_bytes"] + norms
    assert sum(d["cache_bytes_per_token"] for d in (first, second, third)) == whole["cache_bytes_per_token"]
    code, out, _ = _numflow(capsys, "inspect", folder, "--devices", "0&1;2")
    assert code == 0 and "layers 0-0  tokens 0-" in out and "3 all_reduce" in out


@pytest.mark.parametrize(("devices", "message"), [
    ("0;;1", "devices '0;;1': position 3: expected a device: a number or 'cpu', found ';1'"),
    ("0;1;2", "2 layers cannot be cut into 3 groups of devices"),
])
def test_one_line_says_what_is_wrong(folder, capsys, devices, message):
    for command in (("inspect", folder), ("bench", "-m", folder)):
        code, _, err = _numflow(capsys, *command, "--devices", devices)
        assert code == 1 and message in err and "Traceback" not in err
