"""Readers of quantised checkpoints, adapters and imatrix files, fuzzed for some seconds (fuzz_readers.py)."""

import pytest

from tests.formats.fuzz_readers import READERS, fuzz

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_end_in_one_line(tmp_path, name):
    tries, good, slowest = fuzz(name, tmp_path, 15)
    assert 0 < good < tries and slowest < 20
