"""A private Ray cluster: for this machine only, and shut down with the service that has started it."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.conftest import REPO
from tests.server.processes import ServerProcess
from tests.server.tiny import write_chat_model

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
SCRIPT = """
import os
from pathlib import Path
from numflow.partition.cluster.connect import connected
ray = connected()
print(*(node["NodeManagerAddress"] for node in ray.nodes()))
parents, commands = {}, {}
for folder in Path("/proc").glob("[0-9]*"):
    try:
        status = (folder / "status").read_text()
        parents[int(folder.name)] = int(status.split("PPid:")[1].split()[0])
        commands[int(folder.name)] = (folder / "cmdline").read_text()
    except OSError:
        continue

def ours(pid):  # another cluster on this machine listens as it likes
    return pid == os.getpid() or pid in parents and ours(parents[pid])

cluster, owned = [pid for pid in parents if pid != os.getpid() and ours(pid)], set()
assert all(any(name in commands[pid] for pid in cluster) for name in ("gcs_server", "raylet")), commands
for pid in cluster:
    try:
        owned |= {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    except OSError:
        continue
for table, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        address = words[1].partition(":")[0]
        if words[3] == "0A" and f"socket:[{words[9]}]" in owned and not address.endswith("0100007F"):
            print("open", table, words[1])
"""


def test_it_listens_on_loopback_alone():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True,
                          timeout=300, env=environment | {"PYTHONPATH": str(REPO)})
    assert done.stdout.splitlines() == ["127.0.0.1"], done.stdout + done.stderr


def test_sigterm_ends_replicas_with_0(tmp_path):
    write_chat_model(tmp_path)
    with ServerProcess("-m", f"tiny={tmp_path}", "--replicas", "1", "--threads", "1", wait=False) as server:
        server.wait_ready(300)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2},
                          timeout=120).status_code == 200
        assert server.stop(signal.SIGTERM, 120) == 0
        server._reader.join(10)
        assert not any("stack" in line.lower() or "Traceback" in line for line in server.log)
