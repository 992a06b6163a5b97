"""Fill-in-the-middle (FIM): prompts for models that generate the text between a prefix and a suffix."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BEFORE, AFTER = "before", "after"  # slots of prefix and suffix


@dataclass(frozen=True)
class FillIn:
    """FIM format of a vocabulary. order: token ids and the slots of the two texts. ends: end tokens of the middle text.
    file: token before another file, followed by the file's name; None: no token."""

    order: tuple[int | str, ...]
    ends: tuple[int, ...]
    file: int | None = None

    def ids(self, tokenizer, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Token ids of a prompt. Special tokens written in the texts are ordinary characters.

        files: names and texts of further files, which come first.
        """
        texts = {BEFORE: before, AFTER: after}
        found: list[int] = []
        for name, text in files:
            found += ([] if self.file is None else [self.file]) + tokenizer.encode(f"{name}\n{text}\n", False, False)
        for part in self.order:
            found += [part] if isinstance(part, int) else tokenizer.encode(texts[part], False, False)
        return tokenizer.wrapping.apply(found)[0]


@cache
def _rows() -> list[Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("fill_in.toml").read_text(encoding="utf-8"))["way"]


def find_fill_in(tokenizer) -> FillIn | None:
    """The first FIM format whose tokens are all in the vocabulary; None without one."""
    def id_of(text: str) -> int | None:
        return tokenizer.vocabulary.id(text)

    for row in _rows():
        order = [part if part in (BEFORE, AFTER) else id_of(part) for part in row["order"]]
        if None not in order:
            ends = (id_of(text) for text in row["ends"])
            return FillIn(tuple(part for part in order if part is not None),
                          tuple(id for id in ends if id is not None), id_of(row["file"]) if "file" in row else None)
    return None
