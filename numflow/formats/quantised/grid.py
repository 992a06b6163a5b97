"""Scales of a matrix in a separate tensor: one for all, or per row, column, block or group of columns."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.parts import StoredParts, scale_values

Rows = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class ScaleGrid:
    """rows: returns scales of a range of rows, f32 [n, groups]. group: columns per scale."""

    rows: Rows
    group: int


def scale_grid(parts: StoredParts, scale: Tensor, shape: tuple[int, ...], values=scale_values) -> ScaleGrid:
    """The grid of a tensor of scales for a matrix [..., N, K].

    values: converts the tensor to float32 in its shape.

    Raises:
        FormatError: the shape fits no arrangement.
    """
    *lead, n, k = shape
    count, found = math.prod(lead), scale.shape
    if not (n and k):
        raise parts.fail(scale.name, f"is {scale.type.name} {show(list(found))}, for {list(shape)} weights: there are "
                                     "none")
    block, said = parts.method.block, parts.method.strategies
    if block and scale.name.endswith("_scale_inv"):
        return _in_blocks(parts, scale, values, shape, block)
    if said and not _is_said(said, found, shape, block):
        kinds = " or ".join(f"{kind}{''.join(f' of {size}' for size in sizes if size)}" for kind, sizes in said.items())
        raise parts.fail(scale.name, f"is {scale.type.name} {show(list(found))}, which are no scales by {kinds} of "
                                     f"{list(shape)} weights, as the configuration says")
    if math.prod(found) == 1 and (not said or "tensor" in said):
        return _blocks(scale, values, (1, 1), (count * n, k), (count * n, k))
    if block and found == (*lead, -(-n // block[0]), -(-k // block[1])):
        return _blocks(scale, values, found[-2:], block, (n, k))
    if len(found) == 4 and not lead and found[1::2] == (1, 1) and all(found) and not (n % found[0] or k % found[2]):
        return _blocks(scale, values, found[::2], (n // found[0], k // found[2]), (n, k))  # blocks as in ModelOpt
    ways = {(*lead, n, 1): (1, k), (*lead, n): (1, k), (*lead, 1, k): (n, 1)}
    if lead:
        ways |= {(*lead, 1, 1): (n, k), (*lead, 1): (n, k), tuple(lead): (n, k)}
    if found in ways:
        rows, columns = ways[found]
        return _blocks(scale, values, (n // rows, k // columns), (rows, columns), (n, k))
    if len(found) == len(shape) and found[:-1] == (*lead, n) and found[-1] and k % found[-1] == 0:
        return _blocks(scale, values, found[-2:], (1, k // found[-1]), (n, k))
    wanted = f", {[*lead, -(-n // block[0]), -(-k // block[1])]} (blocks of {block[0]} x {block[1]})" if block else ""
    raise parts.fail(scale.name, f"is {scale.type.name} {show(list(found))}; scales of {list(shape)} weights should be "
                                 f"[1], {[*lead, n, 1]}{wanted} or {[*lead, n]} by groups whose number divides {k}")


def _is_said(said: Mapping[str, Collection[int | None]], found: tuple[int, ...], shape: tuple[int, ...],
             block: tuple[int, int] | None) -> bool:
    """Whether scales of a shape match one of the strategies in the configuration."""
    *lead, n, k = shape
    if "tensor" in said and (math.prod(found) == 1 or (lead and found in (tuple(lead), (*lead, 1), (*lead, 1, 1)))):
        return True
    if "block" in said and (block is None or found == (*lead, -(-n // block[0]), -(-k // block[1]))):
        return True
    groups = 1 if found == (*lead, n) else found[-1] if found[:-1] == (*lead, n) else 0
    if groups == 1 and not {"channel", "token", "attn_head"}.isdisjoint(said):
        return True
    sizes = {*said.get("group", ()), *said.get("tensor_group", ())}
    return groups > 0 and any(size is None or (groups == 1 if size < 1 else -(-k // size) == groups) for size in sizes)


def _in_blocks(parts: StoredParts, scale: Tensor, values, shape: tuple[int, ...], block: tuple[int, int]) -> ScaleGrid:
    *lead, n, k = shape
    wanted = (*lead, -(-n // block[0]), -(-k // block[1]))
    found = scale.shape
    if found != wanted and found[:-1] == (*lead, n) and found[-1] and k % found[-1] == 0:
        return _blocks(scale, values, found[-2:], (1, k // found[-1]), (n, k))  # groups of a row, in some experts
    if found != wanted:
        raise parts.fail(scale.name, f"is {scale.type.name} {show(list(scale.shape))}, expected {list(wanted)}: blocks "
                                     f"of {block[0]} x {block[1]} of {list(shape)} weights")
    return _blocks(scale, values, wanted[-2:], block, (n, k))


def _blocks(scale: Tensor, values, grid: tuple[int, ...], sizes: tuple[int, int], shape: tuple[int, int]) -> ScaleGrid:
    """Scales [matrices * grid rows, grid columns], each for a block of `sizes` rows and columns."""
    n, k = shape
    group = math.gcd(k, sizes[1]) if sizes[1] < k else k
    columns = np.arange(k // group) * group // sizes[1]
    whole = bool((columns == np.arange(grid[1])[:len(columns)]).all()) if len(columns) == grid[1] else False

    @functools.cache
    def all_scales() -> np.ndarray:
        return values(scale).reshape(-1, grid[1])

    def rows(begin: int, end: int) -> np.ndarray:
        index = np.arange(begin, end)
        chosen = all_scales()[index // n * grid[0] + index % n // sizes[0]]
        return chosen if whole else chosen[:, columns]

    return ScaleGrid(rows, group)
