"""The cache of prepared files: eviction, and detection of changed model files."""

import os
import shutil
import time
from collections import namedtuple

import numpy as np
import pytest

from numflow import kernel_cache
from numflow.formats import kept

STATE = "0" * 16


def place(folder, model="model", state=STATE, rest="rest"):
    return folder / kept.file_name(folder / model, state, [rest])


def put(path, nbytes=1000, days=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(nbytes))
    os.utime(path, (time.time() - days * 86400,) * 2)
    return path


@pytest.fixture
def free(monkeypatch):
    """Sets the free disk space that is seen."""
    def let(nbytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(nbytes))
    return let


def test_a_quarter_of_the_disk_at_most(tmp_path, free):
    path = place(tmp_path / "new")
    free(3999)
    assert not kept.make_room(path, 1000)
    free(4000)
    assert kept.make_room(path, 1000) and path.parent.is_dir()


def test_what_was_used_least_recently_goes_first(tmp_path, free):
    files = [put(place(tmp_path, f"model {i}"), days=i) for i in range(4)]
    free(12000)  # with the 4000 that are taken a quarter is 4000
    assert kept.make_room(place(tmp_path, "another"), 2000)
    assert [file.exists() for file in files] == [True, True, False, False]


def test_nothing_goes_for_what_has_no_room_anyway(tmp_path, free):
    file = put(place(tmp_path, "old"))
    free(7000)
    assert not kept.make_room(place(tmp_path, "new"), 2001) and file.exists()


def test_what_the_model_file_held_before_goes(tmp_path, free):
    free(1 << 20)
    before, other, same = (put(place(tmp_path, *names)) for names in (
        ("model", "1" * 16), ("other", "1" * 16), ("model", STATE, "another recipe")))
    assert kept.make_room(place(tmp_path), 1000)
    assert not before.exists() and other.exists() and same.exists()


def test_what_nothing_has_used_goes(tmp_path):
    old, new = (put(tmp_path / f"{days}", days=kernel_cache.KEEP_DAYS + days) for days in (1, -1))
    kept.prune(tmp_path)
    assert not old.exists() and new.exists()
    kept.prune(tmp_path / "missing")


def test_the_state_of_files(tmp_path):
    first, second = put(tmp_path / "a"), put(tmp_path / "b")
    state = kept.state_of([first, second])
    assert state == kept.state_of([first, second]) and "_" not in state
    assert len({state, kept.state_of([first]), kept.state_of([second]), kept.state_of([second, first])}) == 4
    times = first.stat().st_atime_ns, first.stat().st_mtime_ns
    time.sleep(0.02)  # longer than a tick of the file system's clock
    first.write_bytes(b"x" * 1000)
    os.utime(first, ns=times)  # as copies that keep dates do
    assert kept.state_of([first, second]) != state
    with pytest.raises(OSError):
        kept.state_of([tmp_path / "missing"])


@pytest.mark.parametrize("nbytes", [0, 7, 8, kept.PIECE, kept.PIECE + 9])
def test_any_changed_byte_changes_the_sum(nbytes):
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    found = kept.checksum(map(kept.piece_sum, kept.pieces(values)))
    for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        values[at] ^= 1
        assert kept.checksum(map(kept.piece_sum, kept.pieces(values))) != found
        values[at] ^= 1
    assert kept.checksum(map(kept.piece_sum, kept.pieces(values))) == found
