"""Rows of hashed n-grams (op `ngram_ids`)."""

import numpy as np

from numflow.reference.state import sequences


def ngram_ids(*, batch, state, multipliers, sizes, separator):
    """Rows of the n-grams that end at each token, n = 2 .. N; ids i32 [T, H].

    multipliers: N integers. sizes: rows of each of the H parts of the table, H / (N - 1) parts for each n. The state
    [N - 1] has the tokens before the batch, plus 1; 0 is a token that n-grams do not reach.
    """
    count, ids = len(multipliers) - 1, np.empty((len(batch.tokens), len(sizes)), np.int32)
    starts, each = np.cumsum([0, *sizes[:-1]]), len(sizes) // count
    for rows, (last,) in sequences(batch, state):
        history = [int(value) - 1 for value in last]
        for t in range(rows.start, rows.stop):
            history.append(int(batch.tokens[t]))
            reached, mixed, found = True, history[-1] * multipliers[0], []
            for back in range(1, count + 1):
                reached = reached and history[-1 - back] not in (-1, separator)
                mixed ^= (history[-1 - back] if reached else separator) * multipliers[back]
                found += [mixed] * each
            ids[t] = [hashed % size + start for hashed, size, start in zip(found, sizes, starts.tolist(), strict=True)]
        last[...] = [token + 1 for token in history[-count:]]
    return ids
