"""Rows of tables: token, position and token-type embeddings (ops `embed`, `embed_position`, `embed_type`)."""

import numpy as np


def embed(table, *, batch, scale, first=0, vocabulary=0):
    """y[t] = table[tokens[t]] * scale; table [V, D] -> y [T, D].

    vocabulary: of a table of so many rows, `table` has those from `first` on; rows of other tokens become -0.0.
    """
    if not vocabulary:
        return table[batch.tokens] * np.float32(scale)
    rows = batch.tokens - first
    here = (rows >= 0) & (rows < len(table))
    y = np.full((len(rows), table.shape[1]), -0.0, np.float32)
    y[here] = table[rows[here]] * np.float32(scale)
    return y


def embed_position(x, table, *, batch, offset):
    """y[t] = x[t] + table[positions[t] + offset]; table [P, D], x [T, D]."""
    return x + table[batch.positions + offset]


def embed_type(x, table, *, batch):
    """y[t] = x[t] + table[types[t]]; all types are 0 where the batch has none."""
    types = np.zeros_like(batch.tokens) if batch.types is None else batch.types
    return x + table[types]
