"""Draft tokens by looking up what came after the latest tokens earlier in the text (prompt look-up, Saxena 2023)."""

import numpy as np

LONGEST, SHORTEST = 4, 1  # tokens that must agree


def lookup(ids: np.ndarray, count: int, longest: int = LONGEST, shortest: int = SHORTEST) -> tuple[np.ndarray, int]:
    """`count` tokens that followed the latest earlier occurrence of the text's last tokens; int32, or none.

    The longest run of last tokens (`longest` .. `shortest`) that has been decides; its length is returned too. Where
    the text ends before `count` tokens have followed, the drafts repeat its end.
    """
    ends, agree = np.arange(shortest, len(ids)), 0  # before which the last tokens stand too
    for back in range(1, longest + 1):
        longer = ends[ends >= back]
        longer = longer[ids[longer - back] == ids[-back]] if len(longer) else longer
        if not len(longer):
            break
        ends, agree = longer, back
    if agree < shortest:
        return ids[:0], 0
    return np.resize(ids[ends[-1]:], count), agree
