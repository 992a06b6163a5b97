"""`--draft mtp` on the command line: the model's own block drafts, and the text does not change."""

import re

import pytest

from tests.engine.published import write_letters
from tests.engine.test_mtp import table_of_next_words

pytest.importorskip("tokenizers")


def test_generate_with_the_block_of_the_model(run, tmp_path):
    table_of_next_words(tmp_path)
    write_letters(tmp_path, 203)
    options = ("-m", tmp_path, "-n", "24", "--set", "ignore_eos=true", "--temperature", "0", "--device", "reference",
               "--stats")
    plain = run("generate", *options, "hello")
    drafted = run("generate", *options, "--draft", "mtp", "--set", "draft_tokens=4", "hello")
    assert (plain.code, drafted.code) == (0, 0), plain.err + drafted.err
    assert drafted.out == plain.out and plain.out.strip()
    right, guesses = map(int, re.search(r"(\d+) of (\d+) drafts accepted", drafted.err).groups())
    assert right == guesses >= 16 and "guesses" not in plain.err
