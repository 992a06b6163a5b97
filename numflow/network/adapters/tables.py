"""Embedding tables: tied tables, untied where an adapter changes the table or the output matrix alone, and tables with
replaced rows."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from numflow import network
from numflow.errors import FormatError, SpecError
from numflow.formats.adapter import Adapter, LowRank, computed
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.ops import Network
from numflow.spec.reader import Spec

_TIED = re.compile(r"tie_\w*embed\w*")  # keys of config.json


def tied_table(built: Network) -> str | None:
    """The tensor that is both the embedding table and the output matrix; None if untied, or without an output
    matrix."""
    steps, logits = built.entries["main"], built.outputs.get("logits")

    def tensors(role: str, found: Any) -> set[str]:
        return {part.tensor for step in steps if found(step) for part in built.weights[step.weights[role]].parts}

    table = tensors("table", lambda step: step.op == "embed")
    head = tensors("weight", lambda step: step.op == "linear" and step.outputs == (logits,))
    return next(iter(head)) if len(head) == 1 and head <= table else None


def with_tokens(own: Adapter, checkpoint: Checkpoint, heads: Collection[str], tied: str | None) -> Adapter:
    """The adapter with replaced rows of tables as low-rank changes, also of a tied output matrix.

    A holds the differences of the rows; B has a one-hot column for each. heads: possible names of the output matrix.
    tied: the table that is also the output matrix.
    """
    added, replaced, head_rows = dict(own.added), dict(own.replaced), own.tokens.keys() & {*heads}
    changed_heads = [name for name in heads if name in own.added and name not in head_rows]
    for name, (rows, tensor) in own.tokens.items():
        of_head = tied is not None and name in heads and name not in checkpoint.tensors
        table = checkpoint.tensors[tied] if of_head and tied is not None else existing(own, checkpoint, name)
        if name in own.replaced or (name == tied and any(head in own.replaced for head in heads)):
            raise FormatError(f"{own.path}: {name!r} is changed twice")
        if max(rows, default=0) >= table.rows:
            raise FormatError(f"{own.path}: trainable_token_indices: {max(rows)}, but {name!r} has {table.rows} rows "
                              f"in {checkpoint.path}")
        for matrix in (name, *(changed_heads if name == tied else ())):
            if matrix in own.added:  # the low-rank change is added to the new rows
                replaced[matrix] = _with_rows(rows, tensor, table)
            else:
                added[matrix] = _rows_changed(rows, tensor, table)
    return replace(own, added=added, replaced=replaced,
                   head_too=own.head_too or (bool(own.tokens) and not head_rows and not changed_heads))


def _with_rows(rows: tuple[int, ...], tensor: Tensor, table: Tensor) -> Tensor:
    def values() -> np.ndarray:
        found = np.array(table.f32(), np.float32)
        found[list(rows)] = tensor.f32()
        return found

    return computed(tensor.name, table.shape, values)


def _rows_changed(rows: tuple[int, ...], tensor: Tensor, table: Tensor) -> LowRank:
    def one_hot() -> np.ndarray:
        values = np.zeros((table.rows, len(rows)), np.float32)
        values[list(rows), range(len(rows))] = 1
        return values

    difference = computed(tensor.name, tensor.shape, lambda: tensor.f32() - table.f32(list(rows)))
    return LowRank(difference, computed(tensor.name, (table.rows, len(rows)), one_hot), 1.0, fixed=True)


def untied(own: Adapter, checkpoint: Checkpoint, spec: Spec, built: Network, head: str | None) -> Checkpoint:
    """The checkpoint with a separate output matrix, a copy of the embedding table."""
    table = tied_table(built)
    if head is None or table is None:
        raise FormatError(f"{own.path}: changes only one of embedding table and output matrix, which are tied in "
                          f"{checkpoint.path}, and spec {spec.name!r} has no name for the output matrix")
    tensors = {**checkpoint.tensors}
    tensors.setdefault(head, replace(tensors[table], name=head))
    config = dict(checkpoint.config)
    if checkpoint.naming == "hf":
        config = {key: {**value, **_untied_keys(value)} if isinstance(value, dict) else value
                  for key, value in config.items()} | {"tie_word_embeddings": False} | _untied_keys(config)
    for settings in (config, checkpoint.config):  # the key may change more than the matrix, hence the comparison below
        candidate = replace(checkpoint, tensors=tensors, config=settings)
        try:
            found = network.build(spec, candidate, fuse=False)
        except SpecError:
            continue  # the spec supports one value of the key only
        if tied_table(found) is None and _steps(found) == _steps(built):
            return candidate
    raise FormatError(f"{own.path}: changes only one of embedding table and output matrix, which are tied in "
                      f"{checkpoint.path}, and spec {spec.name!r} cannot untie them")


def _untied_keys(config: Mapping[str, Any]) -> dict[str, bool]:
    """The keys of config.json that tie the embeddings, set to false."""
    return {key: False for key, value in config.items() if isinstance(value, bool) and _TIED.fullmatch(key)}


def _steps(built: Network) -> list[tuple]:
    return [(step.op, step.inputs, step.outputs, dict(step.params)) for steps in built.entries.values()
            for step in steps]


def existing(own: Adapter, checkpoint: Checkpoint, name: str) -> Tensor:
    """The checkpoint's tensor of this name; FormatError if there is none."""
    if name not in checkpoint.tensors:
        raise FormatError(f"{own.path}: made for another model: {checkpoint.path} has no tensor {name!r}")
    return checkpoint.tensors[name]
