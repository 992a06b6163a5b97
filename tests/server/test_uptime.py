"""A service whose device processes die: /health reports it, the model is loaded again, or the service exits."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.server.processes import ServerProcess
from tests.server.tiny import write_chat_model
from tests.waiting import until

BODY = {"prompt": [5, 6, 7], "max_tokens": 2}


@pytest.fixture
def config(tmp_path):
    """Write a configuration of one model on two devices, each a process; return its path."""
    def write(**service):
        (tmp_path / "model").mkdir()
        write_chat_model(tmp_path / "model")
        lines = ["[service]", *(f'{key} = "{value}"' for key, value in service.items()), "[models.m]",
                 f'path = "{tmp_path / "model"}"', 'devices = "0;1"', 'transport = "processes"', "threads = 1"]
        (tmp_path / "config.toml").write_text("\n".join(lines))
        return str(tmp_path / "config.toml")

    return write


def workers(pid: int) -> list[int]:
    """Device processes: children spawned by Python's multiprocessing."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text()
        except OSError:
            continue  # the process has ended meanwhile
        if parent == pid and "spawn_main" in words:
            found.append(int(folder.name))
    return found


def get(server, path):
    return httpx.get(server.url + path, timeout=60)


def complete(server):
    return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=120)


@pytest.mark.merge
def test_a_killed_device_is_told_and_the_model_is_loaded_again(config):
    with ServerProcess("-c", config()) as server:
        assert complete(server).status_code == 200
        os.kill(workers(server.process.pid)[0], signal.SIGKILL)
        told = until(lambda: (reply := get(server, "/health")).status_code == 503 and reply, "a word in /health")
        assert told.json()["status"] == "failed" and "killed by signal 9" in told.json()["models"]["m"]
        for path in ("/status", "/metrics", "/v1/models"):
            assert get(server, path).status_code == 200
        assert complete(server).status_code in (200, 503)  # loaded again meanwhile, or 503
        server.wait_ready()
        assert complete(server).status_code == 200
        assert 'numflow_model_up{model="m"} 1.0' in get(server, "/metrics").text
        assert any('"loaded_again": true' in line for line in server.log)
        assert server.stop() == 0


@pytest.mark.merge
def test_the_service_ends_where_it_is_told_to(config):
    with ServerProcess("-c", config(on_failure="exit")) as server:
        os.kill(workers(server.process.pid)[0], signal.SIGKILL)
        assert server.process.wait(60) == 1
        server._reader.join(10)
        assert any("model m: the process of device" in line and "Traceback" not in line for line in server.log)


@pytest.mark.slow
def test_a_stopped_device_counts_as_lost(config):
    with ServerProcess("-c", config()) as server:
        os.kill(workers(server.process.pid)[0], signal.SIGSTOP)
        reply = complete(server)
        assert reply.status_code == 503 and "has been stopped" in reply.json()["error"]["message"]
        server.wait_ready()
        assert complete(server).status_code == 200
