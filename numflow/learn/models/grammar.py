"""Sentences from templates, with the information in every choice: text without limit whose entropy is known.

A template has {slots}. A slot is filled with a word of its kind, the part of its name before the dot: {name.a} and
{name.b} are two different names. A slot that comes twice holds the same word, so a reader, or a program, sees whether
a model keeps to its own story. The bits of all choices of a text add up to its information. A mean over texts is the
entropy, and no loss of a model can stay below it.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence

_SLOT = re.compile(r"\{([a-z]+(?:\.[a-z])?)\}")


class Writer:
    """Makes choices and counts their bits. rng: what chooses."""

    def __init__(self, rng: random.Random):
        self.rng, self.bits = rng, 0.0

    def choose(self, choices: Sequence):
        """One of them, all equally likely."""
        self.bits += math.log2(len(choices))
        return self.rng.choice(choices)

    def weighted(self, shares: Mapping):
        """A key, as likely as its share among all."""
        keys, weights = list(shares), list(shares.values())
        key = self.rng.choices(keys, weights)[0]
        self.bits -= math.log2(shares[key] / sum(weights))
        return key

    def fill(self, template: str, words: Mapping[str, Sequence[str]],
             derived: Callable[[str, dict], str | None] = lambda slot, filled: None) -> str:
        """A template with its slots filled; derived: the word of a slot that follows from others, at no bits."""
        filled: dict[str, str] = {}

        def word(match):
            slot = match[1]
            if slot not in filled:
                known = derived(slot, filled)
                taken = set(filled.values())
                filled[slot] = known if known is not None else self.choose(
                    [w for w in words[slot.partition(".")[0]] if w not in taken])
            return filled[slot]

        text = _SLOT.sub(word, template)
        return text[0].upper() + text[1:]


def pattern(template: str, words: Mapping[str, Sequence[str]]) -> re.Pattern:
    """A regular expression of a template's texts: any word of its kind in a slot, the same where it comes again."""
    seen: set[str] = set()

    def part(at: int, piece: str) -> str:
        if at % 2 == 0:
            return re.escape(piece)
        group = piece.replace(".", "_")
        if group in seen:
            return f"(?P={group})"
        seen.add(group)
        return f"(?P<{group}>{'|'.join(map(re.escape, words[piece.partition('.')[0]]))})"

    return re.compile("".join(part(at, piece) for at, piece in enumerate(_SLOT.split(template))), re.IGNORECASE)
