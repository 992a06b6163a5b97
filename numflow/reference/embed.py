"""Rows of tables: token, position and token-type embeddings (ops `embed`, `embed_position`, `embed_type`), and rows of
given indices (`embed_ids`)."""

import numpy as np


def embed(table, *, batch, scale, first=0, vocabulary=0):
    """y[t] = table[tokens[t]] * scale; table [V, D] -> y [T, D].

    vocabulary: rows of the whole table, of which `table` has the rows from `first` on; y[t] is -0.0 for other tokens.
    """
    return _rows(table, batch.tokens, first, scale)


def embed_ids(ids, table, *, first=0, vocabulary=0):
    """y[t] = rows ids[t, n] of the table, side by side; table [V, E], ids i32 [T, N] -> y [T, N * E]. first,
    vocabulary: as in `embed`."""
    return _rows(table, ids.reshape(-1), first).reshape(len(ids), -1)


def _rows(table, ids, first, scale=1.0):
    """Rows ids - first of a table, times scale; -0.0 for those that it does not have."""
    rows = ids - first
    inside = (rows >= 0) & (rows < len(table))
    y = np.full((len(rows), table.shape[1]), -0.0, np.float32)
    y[inside] = table[rows[inside]] * np.float32(scale)
    return y


def embed_position(x, table, *, batch, offset):
    """y[t] = x[t] + table[positions[t] + offset]; table [P, D], x [T, D]."""
    return x + table[batch.positions + offset]


def embed_type(x, table, *, batch):
    """y[t] = x[t] + table[types[t]]; all types are 0 if the batch has none."""
    types = np.zeros_like(batch.tokens) if batch.types is None else batch.types
    return x + table[types]
