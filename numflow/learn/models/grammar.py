"""Sentences from templates, with the information content of every choice: unlimited text with a known entropy.

A template has {slots}. A slot is filled with a word of its kind, the part of its name before the dot: {name.a} and
{name.b} are two different names. A slot that occurs twice gets the same word, so that a program can check whether a
model's story is consistent. The information of a text is the sum of the bits of its choices. The mean over texts is the
entropy, which is a lower bound of the loss of any model.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence

_SLOT = re.compile(r"\{([a-z]+(?:\.[a-z])?)\}")


class Writer:
    """Makes random choices and sums their bits."""

    def __init__(self, rng: random.Random):
        self.rng, self.bits = rng, 0.0

    def choose(self, choices: Sequence):
        """One of the choices, with equal probabilities."""
        self.bits += math.log2(len(choices))
        return self.rng.choice(choices)

    def weighted(self, shares: Mapping):
        """A key of `shares`, with a probability in proportion to its share."""
        keys, weights = list(shares), list(shares.values())
        key = self.rng.choices(keys, weights)[0]
        self.bits -= math.log2(shares[key] / sum(weights))
        return key

    def fill(self, template: str, words: Mapping[str, Sequence[str]],
             derived: Callable[[str, dict], str | None] = lambda slot, filled: None) -> str:
        """A template with filled slots. derived: returns the word of a slot that follows from other slots (0 bits), or
        None."""
        filled: dict[str, str] = {}

        def word(match):
            slot = match[1]
            if slot not in filled:
                follows = derived(slot, filled)
                taken = set(filled.values())
                filled[slot] = follows if follows is not None else self.choose(
                    [w for w in words[slot.partition(".")[0]] if w not in taken])
            return filled[slot]

        text = _SLOT.sub(word, template)
        return text[0].upper() + text[1:]


def pattern(template: str, words: Mapping[str, Sequence[str]]) -> re.Pattern:
    """A regular expression for the texts of a template: any word of the kind in a slot, the same word in later ones."""
    seen: set[str] = set()

    def part(index: int, piece: str) -> str:
        if index % 2 == 0:  # text between slots
            return re.escape(piece)
        group = piece.replace(".", "_")
        if group in seen:
            return f"(?P={group})"
        seen.add(group)
        return f"(?P<{group}>{'|'.join(map(re.escape, words[piece.partition('.')[0]]))})"

    return re.compile("".join(part(i, piece) for i, piece in enumerate(_SLOT.split(template))), re.IGNORECASE)
