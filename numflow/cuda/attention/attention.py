"""Softmax attention over the paged KV cache (op `attention`): the choice of kernels and grids.

y = softmax(softcap(scale * q k^T) + bias, over the visible keys of the sequence) v

    attention_exact   float32 throughout. For activations "f32", float32 caches, keys of more than 1024 columns,
                      distance buckets (their branches leave too few registers for tensor-core accumulators),
                      relative-position embeddings, keys chosen by an index, and entries beside keys
    attention_few     tensor cores. For decoding: sequences whose new tokens give a key head at most 16 query rows.
                      For every sequence if keys or values have more than 256 columns
    attention_many    tensor cores. For prompts: the other sequences of the batch

If the grid would have too few blocks to fill the GPU, the keys of a head are split into parts (split-KV, as in
flash-decoding), whose partial results attention_join combines. Attention over a step's own cache and a cross cache
beside it is two runs of these kernels, of two or more parts each, which attention_join_two combines.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from numflow.cuda.attention.exact import exact_kernel
from numflow.cuda.attention.few import WIDEST, few_kernel, slices_of
from numflow.cuda.attention.join import MOST_PARTS, join, join_two
from numflow.cuda.attention.many import ROWS, many_kernel, warps_across
from numflow.cuda.attention.parameters import (
    BatchTables,
    Biases,
    Chosen,
    Entries,
    Halves,
    Heads,
    RelativeScores,
    Scores,
)
from numflow.cuda.device.call import N_SEQUENCES, N_TOKENS, Call, Prepared, Sizes, ceil
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.state.cache_code import width
from numflow.cuda.weights.operand import bind_operand
from numflow.network.windows import reach
from numflow.ops import Step, View, param

PART_KEYS = 128   # fewest keys of a part
ENOUGH = 128      # blocks, about one for each multiprocessor of a large GPU, with which keys are not split ...
ALONE_KEYS = 1024  # ... up to this many keys: one block reads the keys faster than parts could be joined
EXACT_ROWS = 64   # most rows for which attention_exact splits the keys
BLOCKS = 528      # blocks that fill a large GPU: four for each multiprocessor (attention_many: two, half as many)
FEW_ROWS = 16     # most query rows of a key head that attention_few takes
TURNS = 8         # most blocks of wide heads, as a multiple of BLOCKS; blocks loop over the remaining rows
NARROW = 64       # widest heads for which attention_few has registers for 16 rows at a time; with wider heads, softcap,
                  # slopes or sinks it takes 8
MOST_COLUMNS = 1024  # widest keys whose queries fit in the shared memory of attention_few
ANY = 2**31 - 1   # no limit on the new tokens of a sequence
NO_HALVES = Halves(None, None, 0)


def attention(step: Step, ctx, leaves: Prepared | None = None) -> list[Call]:
    """q f32 [T, H * E] -> y f32 [T, H * E_v].

    Optional inputs: chosen i32 [T, W] (bitmap of the visible keys, or of the visible blocks for each key head), or one
    or two products with relative-position embeddings f32 [T, H * N]. Optional weights: slopes [H], sinks [H], buckets
    [n, H], position_buckets [2R + 1].
    leaves: the matrix operand, int8 or f16, to which the kernels write y as well, for the `linear` step that follows;
    no unit of the operand crosses a head.
    """
    cache = ctx.caches[param(step, "cache")]
    if name := param(step, "cross"):
        own, others = _over(step, ctx, cache, least=2), _over(step, ctx, ctx.caches[name], least=2)
        return [*own.calls, *others.calls, _join_two(step, ctx, own, others)]
    found = _over(step, ctx, cache, leaves)
    return [*found.calls, *_joins(step, ctx, found)]


class _Share(NamedTuple):
    """Limits of the number of parts: scratch memory for `most` rows of (token, head, part), and the fewest parts."""

    heads: int
    kv_heads: int
    most: int
    least: int

    def of(self, sizes: Sizes, wanted: int) -> int:
        """`wanted` parts, within these limits. A single part needs no scratch memory."""
        room = self.most // (sizes.rows[N_TOKENS] * self.heads)
        return max(self.least, min(MOST_PARTS // self.least, wanted, room))


class _Over(NamedTuple):
    """Attention over one cache: the calls, and scratch memory for the results of so many parts.

    leaves: as in `attention`; None also if only a pass over the row finds the operand's scale. made: whether the
    calls have written that operand already.
    """

    calls: list[Call]
    parts: Callable[[Sizes], int]
    made: Callable[[Sizes], bool] | None
    partial: Ref
    leaves: Prepared | None


def _over(step: Step, ctx, cache, leaves: Prepared | None = None, least: int = 1) -> _Over:
    """Attention over a cache: the step's own, or the cross cache beside it, whose scores have no bias.

    least: fewest parts; with two or more, the kernels never write y.
    """
    (q, *extra), (y,), batch, heads = step.inputs, step.outputs, ctx.batch, param(step, "heads")
    is_own = cache is ctx.caches[param(step, "cache")]
    weights, extra = (step.weights, extra) if is_own else ({}, [])
    chosen, relative = ([], extra) if "position_buckets" in weights else (extra, [])
    shape, causal, window = cache.shape, param(step, "causal"), param(step, "window")
    slopes, sinks, buckets = (ctx.vector(weights[role]) if role in weights else None
                              for role in ("slopes", "sinks", "buckets"))
    n_buckets = ctx.network.weights[weights["buckets"]].shape[0] if buckets else 0
    is_self = shape.kind == "self"
    exact = (n_buckets if causal else n_buckets // 2) // 2
    spread = math.log(param(step, "bucket_distance") / exact) if buckets else 1.0
    entries = ctx.caches[param(step, "entries")] if param(step, "entries") else None
    is_exact = ctx.activations == "f32" or "f32" in cache.types or buckets is not None or bool(extra) \
        or entries is not None or max(shape.k_dim, shape.value_dim) > MOST_COLUMNS
    most = max(EXACT_ROWS * heads * MOST_PARTS, ROWS * BLOCKS) if is_exact else ROWS * BLOCKS
    most = most if least == 1 else max(most, least * heads * ctx.room(y))
    partial = ctx.scratch(f"parts of attention{' to an encoder' * (not is_own)}", 4 * most * (shape.value_dim + 2))
    tables = BatchTables(
        positions=batch.ref("positions"), sequence_of=batch.ref("sequence_of"), starts=batch.ref("starts"),
        table=batch.ref(cache.table), table_stride=batch.stride, lengths=batch.ref(cache.lengths), counts=batch.counts)
    head_shape = Heads(heads=heads, kv_heads=shape.kv_heads, k_dim=shape.k_dim, v_dim=shape.value_dim,
                     block_size=cache.block_size)
    if leaves and leaves.kind == "f16" and (is_exact or cache.types[1] != "f16"):
        leaves = None  # values may exceed the float16 range, so the operand needs a scale from a pass over the row
    halves = Halves(*ctx.place(y, "f16"), wanted=1) if leaves and leaves.kind == "f16" else NO_HALVES
    scores = Scores(scale=param(step, "scale"), cap=param(step, "softcap"), causal=causal and is_self,
                    window=window if is_self else 0, chunk=param(step, "chunk") if is_self else 0,
                    n_buckets=n_buckets, spread=1 / spread)
    args = (ctx.view(y), partial, ctx.view(q), cache.k, cache.v, Biases(slopes, sinks, buckets), tables, head_shape,
            scores)
    cache_sizes = cache.types + tuple(width(*of) for of in zip(cache.types, (shape.k_dim, shape.value_dim)))
    flags = param(step, "softcap") > 0, slopes is not None, sinks is not None, buckets is not None
    share = _Share(heads, shape.kv_heads, most, least)
    if is_exact:
        block = param(step, "block") if is_own else 0
        bits = Chosen(*(ctx.view(chosen[0]) if chosen else (None, 0)), block,
                      chosen[0].width // shape.kv_heads if block else 0)
        kernel = exact_kernel(*cache_sizes, *flags, cache.v_row, bool(chosen), bool(relative), entries is not None,
                              block > 0)
        args = (*args, bits, _relative_scores(step, ctx, relative), _entries(ctx, entries))
        return _Over(*_exact(step, args, kernel, share, _seen(step, entries)), None, partial, leaves)
    return _Over(*_tensor(step, args, cache_sizes, flags, share, cache.v_row, halves), partial, leaves)


def _relative_scores(step: Step, ctx, products: list[View]) -> RelativeScores:
    """The relative-position scores of a step; null pointers if the step has none."""
    if not products:
        return RelativeScores(None, 0, None, 0, None, 0, 0)
    buckets, heads = step.weights["position_buckets"], param(step, "heads")
    keys = ctx.view(products[1]) if len(products) > 1 else (None, 0)
    return RelativeScores(*ctx.view(products[0]), *keys, ctx.vector(buckets),
               ctx.network.weights[buckets].shape[0] // 2, products[0].width // heads)


def _entries(ctx, cache) -> Entries:
    """The rows of a cache of entries; null pointers if there is no such cache."""
    if cache is None:
        return Entries(None, None, 0, 0, 0)
    return Entries(cache.k, ctx.batch.ref(cache.table), cache.block_rows, width("f32", cache.shape.k_dim),
                   cache.shape.every)


def _joins(step: Step, ctx, over: _Over) -> list[Call]:
    """The calls that follow the attention kernels: join the parts, or make the operand if there is only one part."""
    (y,), heads, (_, parts, made, partial, leaves) = step.outputs, param(step, "heads"), over
    operand = ctx.place(y, leaves.kind) if leaves else (None, None)

    def joined(sizes: Sizes) -> Launch:
        return Launch(join(leaves.kind if leaves else ""), (heads, sizes.rows[N_TOKENS], 1), (
            ctx.view(y), partial, parts(sizes), ctx.batch.counts, heads, y.width // heads, *operand))

    calls = [Call(step, joined, leaves=leaves).only(lambda sizes: parts(sizes) > 1)]
    if leaves:  # without parts, a separate kernel makes the operand
        alone = replace(bind_operand(ctx, y, leaves.kind, *operand), leaves=leaves)
        calls.append(alone.only(lambda sizes: parts(sizes) == 1 and not (made and made(sizes))))
    return calls


def _join_two(step: Step, ctx, own: _Over, others: _Over) -> Call:
    """The join of attention over two caches."""
    (y,), heads = step.outputs, param(step, "heads")

    def joined(sizes: Sizes) -> Launch:
        return Launch(join_two(), (heads, sizes.rows[N_TOKENS], 1), (
            ctx.view(y), own.partial, own.parts(sizes), others.partial, others.parts(sizes), ctx.batch.counts, heads,
            y.width // heads))

    return Call(step, joined)


def _seen(step: Step, entries) -> Callable[[Sizes], int]:
    """Keys and entries that the last query of the longest sequence sees; the number of parts follows from the sum."""
    if entries is None:
        return lambda sizes: sizes.keys
    window, every = reach(step), entries.shape.every
    return lambda sizes: min(filter(None, (window, sizes.keys)), default=0) + sizes.keys // every


def _exact(step: Step, args: tuple, exact: Kernel, share: _Share, seen: Callable[[Sizes], int]):
    """The call of attention_exact, and the number of parts."""
    def parts(sizes: Sizes) -> int:
        return share.of(sizes, 1 if sizes.rows[N_TOKENS] > EXACT_ROWS else seen(sizes) // PART_KEYS)

    return [Call(step, lambda sizes: Launch(exact, (share.heads, sizes.rows[N_TOKENS], parts(sizes)), args))], parts


def _tensor(step: Step, args: tuple, cache_sizes: tuple, flags: tuple, share: _Share, v_row: int, halves: Halves):
    """The calls of attention_few and attention_many, the number of parts, and whether attention_few writes the operand
    `halves`."""
    kv_heads, group = share.kv_heads, share.heads // share.kv_heads
    is_wide, slices = max(cache_sizes[2:]) > WIDEST, slices_of(cache_sizes[1], cache_sizes[3])
    few = ANY if is_wide else max(FEW_ROWS // group, 1)  # most new tokens of a sequence that attention_few takes
    rows = ROWS // warps_across(cache_sizes[1], cache_sizes[3])

    def longest(sizes: Sizes) -> int:
        return max(sizes.rows[N_TOKENS] - sizes.rows[N_SEQUENCES] + 1, 1)

    def has_few(sizes: Sizes) -> bool:
        return longest(sizes) <= few or sizes.rows[N_SEQUENCES] > 1

    def has_many(sizes: Sizes) -> bool:
        return longest(sizes) > few

    def tiles(sizes: Sizes) -> int:  # upper bound: the last tile of each sequence may be partly empty
        return ceil(sizes.rows[N_TOKENS] * group, rows) + sizes.rows[N_SEQUENCES] - 1

    def across(sizes: Sizes) -> int:
        """The grid's x dimension for attention_few. The rows of wide heads are shared out among several blocks."""
        if not is_wide:
            return kv_heads
        each = kv_heads * slices
        most_turns = max(TURNS * BLOCKS // (each * sizes.rows[N_SEQUENCES]), 1)
        return each * min(ceil(longest(sizes) * group, 8), most_turns)

    def parts(sizes: Sizes) -> int:
        if is_wide:
            blocks = across(sizes) * sizes.rows[N_SEQUENCES]
            return share.of(sizes, min(sizes.keys // PART_KEYS, BLOCKS // blocks))
        blocks = kv_heads * (has_few(sizes) * sizes.rows[N_SEQUENCES] + has_many(sizes) * tiles(sizes))
        if blocks >= ENOUGH and sizes.keys <= ALONE_KEYS:
            return share.of(sizes, 1)
        room = BLOCKS // 2 if has_many(sizes) else BLOCKS
        return share.of(sizes, min(sizes.keys // PART_KEYS, room // max(blocks, 1)))

    def made(sizes: Sizes) -> bool:
        return halves.wanted != 0 and parts(sizes) == 1 and not has_many(sizes)

    def attend_few(sizes: Sizes) -> Launch:
        wide = min(longest(sizes), few) * group > 8 and max(cache_sizes[2:]) <= NARROW and not any(flags)
        limit = few if has_many(sizes) else ANY
        return Launch(few_kernel(*cache_sizes, 2 if wide else 1, *flags, v_row),
                      (across(sizes), sizes.rows[N_SEQUENCES], parts(sizes)),
                      (*args, limit, halves if made(sizes) else NO_HALVES))

    def attend_many(sizes: Sizes) -> Launch:
        return Launch(many_kernel(*cache_sizes, *flags, v_row), (tiles(sizes), kv_heads, parts(sizes)), (*args, few))

    return [Call(step, attend_few).only(has_few), Call(step, attend_many).only(has_many)], parts, made
