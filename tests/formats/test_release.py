"""Releasing pages of a mapped file: they are read again when touched; other memory is not affected."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from numflow.formats.mapped import MappedFile, release_pages


def resident(array) -> int:
    """KiB of this array's mapping that are resident."""
    inside, address = False, array.ctypes.data
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "Rss:":
            return int(line.split()[1])
    raise AssertionError("not mapped")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(np.arange(1 << 20, dtype=np.uint32).tobytes())
    return MappedFile(path).data


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED") or not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_pages_go_and_come_back(data):
    expected = data.tobytes()
    if (before := resident(data)) < 4096:
        pytest.skip(f"only {before} KiB were resident")
    middle = data[1 << 20:3 << 20].reshape(-1, 512)[3:-5]
    release_pages(middle)
    assert resident(data) < 2500
    assert data.tobytes() == expected


def test_other_memory_is_left_alone(data):
    copy = np.array(data[:100000])
    for array in (copy, copy[5:50], np.frombuffer(bytes(copy), np.uint8), data[::2]):
        before = array.tobytes()
        release_pages(array)
        assert array.tobytes() == before
