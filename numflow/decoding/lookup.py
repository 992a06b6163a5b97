"""Prompt lookup (Saxena 2023): draft tokens that followed an earlier occurrence of the latest tokens in the text."""

import numpy as np

LONGEST, SHORTEST = 4, 1  # n-gram sizes that are looked up


def lookup(ids: np.ndarray, count: int, longest: int = LONGEST, shortest: int = SHORTEST) -> tuple[np.ndarray, int]:
    """Draft `count` tokens that followed the latest earlier occurrence of the text's last tokens; int32, maybe empty.

    The longest n-gram of last tokens (`longest` .. `shortest`) with an earlier occurrence is used; its size is returned
    too. If the text ends before `count` tokens follow, the drafts repeat these tokens.
    """
    ends, size = np.arange(shortest, len(ids)), 0  # positions after an earlier occurrence of the last tokens
    for back in range(1, longest + 1):
        longer = ends[ends >= back]
        longer = longer[ids[longer - back] == ids[-back]] if len(longer) else longer
        if not len(longer):
            break
        ends, size = longer, back
    if size < shortest:
        return ids[:0], 0
    return np.resize(ids[ends[-1]:], count), size
