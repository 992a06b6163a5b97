"""The container and the systemd unit of docs/deploy agree with the program: commands, routes, folders, times."""

import configparser
import json
import re
import shutil
import subprocess
import tomllib

import pytest
import typer

from numflow.cli.app import app
from numflow.server.app import ENDPOINTS
from numflow.server.config.options import SERVICE
from numflow.server.listen import GRACE
from tests.conftest import REPO

DEPLOY = REPO / "docs" / "deploy"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> dict[str, str]:
    """Instructions of the Dockerfile by name; where a name occurs twice, the last."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return dict(line.split(" ", 1) for line in text.splitlines() if line)


def unit() -> configparser.RawConfigParser:
    """The systemd unit, parsed."""
    read = configparser.RawConfigParser(strict=False)
    read.optionxform = str
    read.read(DEPLOY / "numflow.service")
    return read


def is_serve(words: list[str]) -> dict:
    """The options in a command line of `numflow serve`."""
    program, command, *rest = words
    assert (program.rsplit("/", 1)[-1], command) == ("numflow", "serve")
    serve = typer.main.get_command(app).commands["serve"]
    return serve.make_context("serve", rest).params


def test_the_container_starts_the_service():
    told = instructions()
    given = is_serve(json.loads(told["ENTRYPOINT"]) + json.loads(told["CMD"]))
    assert (given["host"], given["port"], given["model"]) == ("0.0.0.0", int(told["EXPOSE"]), ("smollm2",))
    assert re.search(r'"/src\[(\w+)\]"', told["RUN"])[1] in PROJECT["optional-dependencies"]
    least = re.search(r">=\s*3\.(\d+)", PROJECT["requires-python"])[1]
    assert int(re.match(r"python:3\.(\d+)", told["FROM"])[1]) >= int(least)
    assert told["ENV"] == f"NUMFLOW_HOME={told['VOLUME']}" and f"-o numflow {told['VOLUME']}" in told["RUN"]
    assert told["STOPSIGNAL"] == "SIGTERM"


def test_the_container_asks_for_a_route_that_needs_no_key():
    python, _, code = json.loads(instructions()["HEALTHCHECK"].split("CMD ", 1)[1])
    compile(code, "HEALTHCHECK", "exec")
    port, route = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", code).groups()
    assert (python, port) == ("python", instructions()["EXPOSE"])
    assert any(route in one.paths and one.method == "GET" for one in ENDPOINTS) and route.startswith("/health")


def test_the_unit_starts_the_service_and_waits_for_its_end():
    service = unit()["Service"]
    assert str(is_serve(service["ExecStart"].split())["config"]) == "/etc/numflow/service.toml"
    assert service["Environment"] == f"NUMFLOW_HOME=/var/lib/{service['StateDirectory']}"
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > SERVICE["drain_timeout"].default + GRACE
    assert "MemoryDenyWriteExecute" not in service  # JIT compilation needs writable executable memory


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_no_fault_in_the_unit(tmp_path):
    text = (DEPLOY / "numflow.service").read_text()
    mended = tmp_path / "numflow.service"
    mended.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))  # it has to exist
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", mended], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
