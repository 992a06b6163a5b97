"""Softmax attention over the paged cache (op `attention`): which kernels when.

y = softmax(softcap(scale * q k^T) + bias, over the visible keys of the sequence) v

    attention_exact   float32 throughout: activations "f32", float32 caches, keys of more than 1024 columns, buckets of
                      distances, whose branches leave no registers for the sums of tensor cores, vectors of distances,
                      where an index chooses the keys, and entries beside keys
    attention_few     tensor cores, for sequences with so few new tokens that 16 rows hold the queries of a key head,
                      and for all where keys or values have more than 256 columns
    attention_many    tensor cores, for the other sequences of the batch

Where there are fewer blocks than a GPU has room for, the keys of a head are cut into parts, joined by attention_join.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from numflow.cuda.attention.exact import exact_kernel
from numflow.cuda.attention.few import WIDEST, few_kernel, slices_of
from numflow.cuda.attention.join import MOST_PARTS, join
from numflow.cuda.attention.many import ROWS, many_kernel, warps_across
from numflow.cuda.attention.parameters import BatchTables, Biases, Entries, Far, Halves, Heads, Scores
from numflow.cuda.device.call import N_SEQUENCES, N_TOKENS, Call, Prepared, Sizes, ceil
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.parameters import IntRows
from numflow.cuda.state.cache_code import width
from numflow.cuda.weights.operand import bind_operand
from numflow.network.windows import reach
from numflow.ops import Step, View, param

PART_KEYS = 128   # keys of a part, at least
ENOUGH = 128      # blocks, about one for each multiprocessor of a large GPU, from which sequences have one part ...
ALONE_KEYS = 1024  # ... up to so many keys: what reads them all by itself is done before parts would be joined
EXACT_ROWS = 64   # rows up to which the exact kernel shares keys
BLOCKS = 528      # that keep a large GPU busy with few rows: four for each multiprocessor; two with many rows
FEW_ROWS = 16     # of a key head, up to which a sequence has few
TURNS = 8         # times as many blocks as keep it busy, that the rows of wide heads go round
NARROW = 64       # columns of heads of which attention_few has registers for 16 rows at a time; of wider ones, and with
                  # softcap, slopes or sinks, for 8
MOST_COLUMNS = 1024  # of a key, whose queries attention_few has room for
ANY = 2**31 - 1   # tokens of a sequence
NO_HALVES = Halves(None, None, 0)


def attention(step: Step, ctx, leaves: Prepared | None = None) -> list[Call]:
    """q f32 [T, H * E], chosen i32 [T, W] or products with vectors of distances f32 [T, H * N], one or two, slopes [H],
    sinks [H], buckets [n, H], places [2R + 1] -> y f32 [T, H * E_v].

    leaves: the operand that y becomes too, int8 or f16, for the linear behind it; its units are within heads.
    """
    (q, *beside), (y,), batch, heads = step.inputs, step.outputs, ctx.batch, param(step, "heads")
    chosen, far = ([], beside) if "places" in step.weights else (beside, [])
    cache = ctx.caches[param(step, "cache")]
    shape, causal, window = cache.shape, param(step, "causal"), param(step, "window")
    slopes, sinks, buckets = (ctx.vector(step.weights[role]) if role in step.weights else None
                              for role in ("slopes", "sinks", "buckets"))
    n_buckets = ctx.network.weights[step.weights["buckets"]].shape[0] if buckets else 0
    is_self = shape.kind == "self"
    exact = (n_buckets if causal else n_buckets // 2) // 2
    spread = math.log(param(step, "bucket_distance") / exact) if buckets else 1.0
    more = ctx.caches[param(step, "entries")] if param(step, "entries") else None
    is_exact = ctx.activations == "f32" or "f32" in cache.types or buckets is not None or bool(beside) \
        or more is not None or max(shape.k_dim, shape.value_dim) > MOST_COLUMNS
    most = max(EXACT_ROWS * heads * MOST_PARTS, ROWS * BLOCKS) if is_exact else ROWS * BLOCKS
    partial = ctx.scratch("parts of attention", 4 * most * (shape.value_dim + 2))
    tables = BatchTables(
        positions=batch.ref("positions"), sequence_of=batch.ref("sequence_of"), starts=batch.ref("starts"),
        table=batch.ref(cache.table), table_stride=batch.stride, lengths=batch.ref(cache.lengths), counts=batch.counts)
    of_heads = Heads(heads=heads, kv_heads=shape.kv_heads, k_dim=shape.k_dim, v_dim=shape.value_dim,
                     block_size=cache.block_size)
    if leaves and leaves.kind == "f16" and (is_exact or cache.types[1] != "f16"):
        leaves = None  # its scale would have to be found
    halves = Halves(*ctx.place(y, "f16"), wanted=1) if leaves and leaves.kind == "f16" else NO_HALVES
    scores = Scores(scale=param(step, "scale"), cap=param(step, "softcap"), causal=causal and is_self,
                    window=window if is_self else 0, chunk=param(step, "chunk") if is_self else 0,
                    n_buckets=n_buckets, spread=1 / spread)
    args = (ctx.view(y), partial, ctx.view(q), cache.k, cache.v, Biases(slopes, sinks, buckets), tables, of_heads,
            scores)
    sizes_of = cache.types + tuple(width(*of) for of in zip(cache.types, (shape.k_dim, shape.value_dim)))
    flags = param(step, "softcap") > 0, slopes is not None, sinks is not None, buckets is not None
    if is_exact:
        bits = IntRows(*(ctx.view(chosen[0]) if chosen else (None, 0)))
        kernel = exact_kernel(*sizes_of, *flags, cache.v_row, bool(chosen), bool(far), more is not None)
        calls, parts = _exact(step, (*args, bits, _far(step, ctx, far), _entries(ctx, more)), kernel, heads, most,
                              _seen(step, more))
        made = None
    else:
        calls, parts, made = _tensor(step, args, sizes_of, flags, heads, shape.kv_heads, cache.v_row, most, halves)
    return [*calls, *_joins(step, ctx, parts, partial, leaves, made)]


def _far(step: Step, ctx, views: list[View]) -> Far:
    """Products with vectors of distances, or none."""
    if not views:
        return Far(None, 0, None, 0, None, 0, 0)
    places, heads = step.weights["places"], param(step, "heads")
    of_keys = ctx.view(views[1]) if len(views) > 1 else (None, 0)
    return Far(*ctx.view(views[0]), *of_keys, ctx.vector(places),
               ctx.network.weights[places].shape[0] // 2, views[0].width // heads)


def _entries(ctx, cache) -> Entries:
    """Rows of a cache of entries, or none."""
    if cache is None:
        return Entries(None, None, 0, 0, 0)
    return Entries(cache.k, ctx.batch.ref(cache.table), cache.block_rows, width("f32", cache.shape.k_dim),
                   cache.shape.every)


def _joins(step: Step, ctx, parts: Callable[[Sizes], int], partial: Ref, leaves: Prepared | None,
           made: Callable[[Sizes], bool] | None) -> list[Call]:
    """The calls behind those that may have left parts; leaves: as of attention. made: whether it is there already."""
    (y,), heads = step.outputs, param(step, "heads")
    to = ctx.place(y, leaves.kind) if leaves else (None, None)

    def joined(sizes: Sizes) -> Launch:
        return Launch(join(leaves.kind if leaves else ""), (heads, sizes.rows[N_TOKENS], 1), (
            ctx.view(y), partial, parts(sizes), ctx.batch.counts, heads, y.width // heads, *to))

    calls = [Call(step, joined, leaves=leaves).only(lambda sizes: parts(sizes) > 1)]
    if leaves:  # what is not in parts becomes an operand by itself
        alone = replace(bind_operand(ctx, y, leaves.kind, *to), leaves=leaves)
        calls.append(alone.only(lambda sizes: parts(sizes) == 1 and not (made and made(sizes))))
    return calls


def _seen(step: Step, entries) -> Callable[[Sizes], int]:
    """Rows that the last query of the longest sequence sees, by which parts are counted: with entries, few keys."""
    if entries is None:
        return lambda sizes: sizes.keys
    window, every = reach(step), entries.shape.every
    return lambda sizes: min(filter(None, (window, sizes.keys)), default=0) + sizes.keys // every


def _exact(step: Step, args: tuple, attend: Kernel, heads: int, most: int, seen: Callable[[Sizes], int]):
    """The call, and how many parts there are; most: rows of parts that there is room for, one for each head."""
    def parts(sizes: Sizes) -> int:
        many = sizes.rows[N_TOKENS] > EXACT_ROWS
        return 1 if many else max(1, min(MOST_PARTS, seen(sizes) // PART_KEYS, _room(sizes, heads, most)))

    return [Call(step, lambda sizes: Launch(attend, (heads, sizes.rows[N_TOKENS], parts(sizes)), args))], parts


def _room(sizes: Sizes, heads: int, most: int) -> int:
    """Parts of every row that `most` rows of parts have room for; with one part nothing is written there."""
    return most // (sizes.rows[N_TOKENS] * heads)


def _tensor(step: Step, args: tuple, sizes_of: tuple, flags: tuple, heads: int, kv_heads: int, v_row: int, most: int,
            halves: Halves):
    """The calls for sequences with few and with many tokens, how many parts there are, and whether the operand
    `halves` is made; most: as of `_exact`."""
    group = heads // kv_heads
    is_wide, slices = max(sizes_of[2:]) > WIDEST, slices_of(sizes_of[1], sizes_of[3])
    few = ANY if is_wide else max(FEW_ROWS // group, 1)  # tokens
    rows = ROWS // warps_across(sizes_of[1], sizes_of[3])

    def longest(sizes: Sizes) -> int:
        return max(sizes.rows[N_TOKENS] - sizes.rows[N_SEQUENCES] + 1, 1)

    def has_few(sizes: Sizes) -> bool:
        return longest(sizes) <= few or sizes.rows[N_SEQUENCES] > 1

    def has_many(sizes: Sizes) -> bool:
        return longest(sizes) > few

    def tiles(sizes: Sizes) -> int:  # of rows of many tokens; each sequence has a last one that is not full
        return ceil(sizes.rows[N_TOKENS] * group, rows) + sizes.rows[N_SEQUENCES] - 1

    def across(sizes: Sizes) -> int:
        """Blocks beside each other in attention_few: rows of wide heads go round several."""
        if not is_wide:
            return kv_heads
        each = kv_heads * slices
        most_turns = max(TURNS * BLOCKS // (each * sizes.rows[N_SEQUENCES]), 1)
        return each * min(ceil(longest(sizes) * group, 8), most_turns)

    def parts(sizes: Sizes) -> int:
        if is_wide:
            blocks = across(sizes) * sizes.rows[N_SEQUENCES]
            return max(1, min(MOST_PARTS, sizes.keys // PART_KEYS, BLOCKS // blocks, _room(sizes, heads, most)))
        blocks = kv_heads * (has_few(sizes) * sizes.rows[N_SEQUENCES] + has_many(sizes) * tiles(sizes))
        if blocks >= ENOUGH and sizes.keys <= ALONE_KEYS:
            return 1
        room = BLOCKS // 2 if has_many(sizes) else BLOCKS
        return max(1, min(MOST_PARTS, sizes.keys // PART_KEYS, room // max(blocks, 1), _room(sizes, heads, most)))

    def made(sizes: Sizes) -> bool:
        return halves.wanted != 0 and parts(sizes) == 1 and not has_many(sizes)

    def attend_few(sizes: Sizes) -> Launch:
        wide = min(longest(sizes), few) * group > 8 and max(sizes_of[2:]) <= NARROW and not any(flags)
        limit = few if has_many(sizes) else ANY
        return Launch(few_kernel(*sizes_of, 2 if wide else 1, *flags, v_row),
                      (across(sizes), sizes.rows[N_SEQUENCES], parts(sizes)),
                      (*args, limit, halves if made(sizes) else NO_HALVES))

    def attend_many(sizes: Sizes) -> Launch:
        return Launch(many_kernel(*sizes_of, *flags, v_row), (tiles(sizes), kv_heads, parts(sizes)), (*args, few))

    return [Call(step, attend_few).only(has_few), Call(step, attend_many).only(has_many)], parts, made
