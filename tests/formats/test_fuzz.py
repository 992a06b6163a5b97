"""Damaged files of every format: a NumflowError or readable tensors, never anything else.

Longer: `pytest tests/formats/test_fuzz.py -m slow` runs each for minutes.
"""

import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numflow.errors import NumflowError
from numflow.formats import open_checkpoint
from numflow.formats.pickle import read
from tests.formats import make, test_open
from tests.formats.test_llama2c import model, version_2

GGUF = make.gguf([make.pair("a", 8, make.text("b")), make.pair("c", 9, b"\x08\0\0\0\2" + bytes(7) + make.text("x") * 2),
                  make.u32("general.alignment", 32)],
                 [make.entry("w", [32, 2], 2, 0), make.entry("v", [3], 0, 64)], bytes(range(80)))
PICKLE = make.pickled(make.dictionary({
    "state_dict": make.dictionary({"a": make.tensor(make.stored("0", 12), [4, 3], [1, 4]),
                                   "b": make.tensor(make.stored("1", 2, "HalfStorage"), [2], [1])}), "epoch": b"K\1"}))
SEEDS = {
    "safetensors": test_open.SAFETENSORS,
    "gguf": GGUF,
    "zip": test_open.ZIP,
    "legacy": test_open.LEGACY,
    "pickle": PICKLE,
    "llama2c": version_2(model(True), True),
}
# Bytes and pieces that mean something to one format or another.
PIECES = [b"\0" * 8, b"\xff" * 8, b"\xff" * 4, b"\0\0\0\x80", b"\x7f", b"(", b")R", b"tR", b"h\0", b"\x94", b"\x85",
          b"u.", b"cos\nsystem\n", b"}", b"]", b"Q", b"PK\1\2", b"PK\5\6", b"GGUF", b"[", b'"a":', b"\x09\0\0\0", b"."]


def survives(path: Path, data: bytes) -> bool:
    """`open_checkpoint`, and for pickles the list of globals, raise nothing but NumflowError."""
    if data[:2] == b"PK" or data[:1] == b"\x80":
        path.write_bytes(data)
        try:
            assert all(isinstance(name, str) for name in make.requested_globals(path))
        except NumflowError as error:
            assert str(path) in str(error)
    return make.survives(lambda p: open_checkpoint(p).tensors, path, data)


def with_checksum(data: bytes) -> bytes:
    """A checkpoint that contains the pickle with a correct checksum, so that the pickle reader sees the damage."""
    return make.zipped({"m/data.pkl": data, "m/data/0": bytes(48), "m/data/1": bytes(4)})


def edit(data: bytes, edits) -> bytes:
    for position, kind, piece in edits:
        at = int(position * len(data))
        if kind == 0:
            data = data[:at] + piece + data[at + len(piece):]
        elif kind == 1:
            data = data[:at] + piece + data[at:]
        else:
            data = data[:at] + data[at + len(piece):]
    return data


EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 2),
                           st.one_of(st.sampled_from(PIECES), st.binary(min_size=1, max_size=9))),
                 min_size=1, max_size=6)


@pytest.mark.parametrize("name", SEEDS)
def test_undamaged_seeds_are_read(tmp_path, name):
    data = with_checksum(SEEDS[name]) if name == "pickle" else SEEDS[name]
    assert survives(tmp_path / "model", data)


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS)
@pytest.mark.thin(2)
def test_edited_files(tmp_path, name, edits):
    data = edit(SEEDS[name], edits)
    survives(tmp_path / "model", with_checksum(data) if name == "pickle" else data)


@settings(max_examples=100, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_random_pickles(tmp_path, data):
    path = tmp_path / "model"
    make.survives(read, path, with_checksum(data))
    make.survives(read, path, b"\x80\2" + data)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_fuzz_for_long(tmp_path, name):
    """NUMFLOW_FUZZ_SECONDS (default 100) for each seed."""
    rng = random.Random(name)
    end = time.monotonic() + float(os.environ.get("NUMFLOW_FUZZ_SECONDS", "100"))
    path, tries, read_well, slowest = tmp_path / "model", 0, 0, 0.0
    while time.monotonic() < end:
        edits = [(rng.random(), rng.randrange(3), rng.choice(PIECES) if rng.random() < 0.5 else rng.randbytes(
            rng.randint(1, 9))) for _ in range(rng.randint(1, 6))]
        data = edit(SEEDS[name], edits)
        began = time.process_time()
        read_well += survives(path, with_checksum(data) if name == "pickle" else data)
        slowest = max(slowest, time.process_time() - began)
        tries += 1
    print(f"{name}: {tries} files, {read_well} read, the slowest took {slowest * 1000:.0f} ms of the processor")
    assert 0 < read_well < tries
    assert slowest < 20
