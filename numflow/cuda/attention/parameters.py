"""Groups of kernel parameters that the attention kernels share (lang/parameters.py)."""

from typing import NamedTuple

from numflow.cuda.lang.scalar import f32, i32, u32


class Biases(NamedTuple):
    """Weights of the score biases; a null pointer stands for each that the model does not have.

    slopes f32 [H]: ALiBi slopes. sinks f32 [H]: attention sinks. buckets f32 [n, H]: bias of each distance bucket.
    """

    slopes: f32.ptr
    sinks: f32.ptr
    buckets: f32.ptr


class RelativeScores(NamedTuple):
    """Relative-position scores (disentangled attention): products with `count` learned embeddings, f32 [T, H * count].

    queries: products of the queries. keys: products of the keys; keys_stride is 0 if the model has none.
    buckets f32 [2 * max_distance + 1]: index of the embedding for each distance, clamped to +-max_distance.
    """

    queries: f32.ptr
    queries_stride: u32
    keys: f32.ptr
    keys_stride: u32
    buckets: f32.ptr
    max_distance: i32
    count: u32


class Entries(NamedTuple):
    """Cache of entries: rows f32 [blocks][block_rows][width]. A row summarises a window of `every` tokens.

    The row is in the KV block of the window's last token. table: block table of the entries, one row a sequence.
    """

    rows: f32.ptr
    table: i32.ptr
    block_rows: u32
    width: u32
    every: u32


class Chosen(NamedTuple):
    """Bits of the visible keys or entries, i32 [T, W]; or of visible blocks of `block` keys, `words` words of a row for
    each key head."""

    data: i32.ptr
    stride: u32
    block: u32
    words: u32


class BatchTables(NamedTuple):
    """Tokens and block tables of the batch.

    positions, sequence_of i32 [T]: of each token. starts i32 [B + 1]: first token of each sequence. lengths i32 [B]:
    keys in the cache of each sequence. table: block table, table_stride elements a sequence. counts: live rows.
    """

    positions: i32.ptr
    sequence_of: i32.ptr
    starts: i32.ptr
    table: i32.ptr
    table_stride: u32
    lengths: i32.ptr
    counts: i32.ptr


class Halves(NamedTuple):
    """Float16 matrix operand (weights/operand.py) to which the result is written as well, if `wanted` is not 0."""

    words: u32.ptr
    scales: f32.ptr
    wanted: u32


class Heads(NamedTuple):
    """Counts of query heads and key/value heads, columns of a key and of a value, tokens of a KV block."""

    heads: u32
    kv_heads: u32
    k_dim: u32
    v_dim: u32
    block_size: u32


class Scores(NamedTuple):
    """Scale, softcap and mask of scores, and constants of the distance buckets (bias.py)."""

    scale: f32
    cap: f32
    causal: u32
    window: i32
    chunk: i32
    n_buckets: u32
    spread: f32
