"""Rows of tables: token, position and token-type embeddings (ops `embed`, `embed_position`, `embed_type`)."""

import numpy as np


def embed(table, *, batch, scale):
    """y[t] = table[tokens[t]] * scale; table [V, D] -> y [T, D]."""
    return table[batch.tokens] * np.float32(scale)


def embed_position(x, table, *, batch, offset):
    """y[t] = x[t] + table[positions[t] + offset]; table [P, D], x [T, D]."""
    return x + table[batch.positions + offset]


def embed_type(x, table, *, batch):
    """y[t] = x[t] + table[types[t]]; all types are 0 where the batch has none."""
    types = np.zeros_like(batch.tokens) if batch.types is None else batch.types
    return x + table[types]
