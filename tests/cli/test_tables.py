"""Text from files is printed without control sequences that would command the terminal."""

import json

import pytest

from numflow.cli.running import print_json
from numflow.cli.tables import print_fields, print_table, printable


@pytest.mark.parametrize("text, shown", [
    ("a\x1b[2Jb", r"a\x1b[2Jb"), ("\x9b31m", r"\x9b31m"), ("a\nb\tc\x7f", r"a\x0ab\x09c\x7f"),
    ("abc\u202edcba", r"abc\u202edcba"), ("\udc80", r"\udc80"), ("Größe 漢字 e\u0301 👩\u200d💻", None)])
def test_control_characters_are_written_out(text, shown):
    assert printable(text) == (text if shown is None else shown)
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_tables_and_fields_do_so_by_themselves(capsys):
    print_table(["tensor", ">size"], [("blk\x1b]0;x\x07", 4)])
    print_fields([("na\rme", "\x1bc")])
    assert capsys.readouterr().out.splitlines() == [
        "tensor           size", r"blk\x1b]0;x\x07     4", r"na\x0dme  \x1bc"]


def test_json_holds_no_control_character_and_the_same_text(capsys):
    print_json({"name": "a\x1b\x9b\u202e\x7fü"})
    out = capsys.readouterr().out
    assert out.isprintable() or {c for c in out if not c.isprintable()} == {"\n"}
    assert json.loads(out) == {"name": "a\x1b\x9b\u202e\x7fü"}
