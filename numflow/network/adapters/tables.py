"""Tables of tokens: the one that is an output matrix too, parted where an adapter changes one of them alone, and tables
some of whose rows have others in their places."""

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
    """The tensor that is both the embedding table and the output matrix; None where there are two, or no head."""
    steps, logits = built.entries["main"], built.outputs.get("logits")

    def tensors(role: str, found: Any) -> set[str]:
        return {part.tensor for step in steps if found(step) for part in built.weights[step.weights[role]].parts}

    table = tensors("table", lambda step: step.op == "embed")
    head = tensors("weight", lambda step: step.op == "linear" and step.outputs == (logits,))
    return next(iter(head)) if len(head) == 1 and head <= table else None


def with_tokens(own: Adapter, checkpoint: Checkpoint, heads: Collection[str], tied: str | None) -> Adapter:
    """The adapter with rows of tables as changes, also of an output matrix that is the table: B has a column for each,
    in which its own row is 1. heads: names of an output matrix. tied: the table that is the output matrix."""
    added, replaced, alone = dict(own.added), dict(own.replaced), own.tokens.keys() & {*heads}
    apart = [name for name in heads if name in own.added and name not in alone]
    for name, (rows, tensor) in own.tokens.items():
        here = tied is not None and name in heads and name not in checkpoint.tensors
        table = checkpoint.tensors[tied] if here and tied is not None else there(own, checkpoint, name)
        if name in own.replaced or (name == tied and any(head in own.replaced for head in heads)):
            raise FormatError(f"{own.path}: {name!r} is changed twice")
        if max(rows, default=0) >= table.rows:
            raise FormatError(f"{own.path}: trainable_token_indices: {max(rows)}, but {name!r} has {table.rows} rows "
                              f"in {checkpoint.path}")
        for place in (name, *(apart if name == tied else ())):
            if place in own.added:  # what is added comes on top of these rows
                replaced[place] = _with_rows(rows, tensor, table)
            else:
                added[place] = _rows_changed(rows, tensor, table)
    return replace(own, added=added, replaced=replaced,
                   head_too=own.head_too or (bool(own.tokens) and not alone and not apart))


def _with_rows(rows: tuple[int, ...], tensor: Tensor, table: Tensor) -> Tensor:
    def values() -> np.ndarray:
        found = np.array(table.f32(), np.float32)
        found[list(rows)] = tensor.f32()
        return found

    return computed(tensor.name, table.shape, values)


def _rows_changed(rows: tuple[int, ...], tensor: Tensor, table: Tensor) -> LowRank:
    def ones() -> np.ndarray:
        values = np.zeros((table.rows, len(rows)), np.float32)
        values[list(rows), range(len(rows))] = 1
        return values

    more = computed(tensor.name, tensor.shape, lambda: tensor.f32() - table.f32(list(rows)))
    return LowRank(more, computed(tensor.name, (table.rows, len(rows)), ones), 1.0, fixed=True)


def untied(own: Adapter, checkpoint: Checkpoint, spec: Spec, built: Network, head: str | None) -> Checkpoint:
    """The checkpoint with an output matrix of its own, equal to the embedding table."""
    table = tied_table(built)
    if head is None or table is None:
        raise FormatError(f"{own.path}: changes the embedding table or the output matrix alone, which are one in "
                          f"{checkpoint.path}, and spec {spec.name!r} has no name for the second")
    tensors = {**checkpoint.tensors}
    tensors.setdefault(head, replace(tensors[table], name=head))
    config = dict(checkpoint.config)
    if checkpoint.naming == "hf":
        config = {key: {**value, **_parted(value)} if isinstance(value, dict) else value
                  for key, value in config.items()} | {"tie_word_embeddings": False} | _parted(config)
    for settings in (config, checkpoint.config):  # whether they are one may change more than the matrix
        parted = replace(checkpoint, tensors=tensors, config=settings)
        try:
            found = network.build(spec, parted, fuse=False)
        except SpecError:
            continue  # a spec that knows one of the two alone
        if tied_table(found) is None and _steps(found) == _steps(built):
            return parted
    raise FormatError(f"{own.path}: changes the embedding table or the output matrix alone, which are one in "
                      f"{checkpoint.path}, and with spec {spec.name!r} they cannot be parted")


def _parted(config: Mapping[str, Any]) -> dict[str, bool]:
    """Keys that say whether the output matrix is the embedding table, with the answer that it is not."""
    return {key: False for key, value in config.items() if isinstance(value, bool) and _TIED.fullmatch(key)}


def _steps(built: Network) -> list[tuple]:
    return [(step.op, step.inputs, step.outputs, dict(step.params)) for steps in built.entries.values()
            for step in steps]


def there(own: Adapter, checkpoint: Checkpoint, name: str) -> Tensor:
    if name not in checkpoint.tensors:
        raise FormatError(f"{own.path}: made for another model: {checkpoint.path} has no tensor {name!r}")
    return checkpoint.tensors[name]
