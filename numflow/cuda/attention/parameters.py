"""Parameters that the kernels of attention share (lang/parameters.py)."""

from typing import NamedTuple

from numflow.cuda.lang.scalar import f32, i32, u32


class Biases(NamedTuple):
    """Weights of attention: slopes f32 [H], sinks f32 [H], buckets f32 [n, H], if it has them."""

    slopes: f32.ptr
    sinks: f32.ptr
    buckets: f32.ptr


class Far(NamedTuple):
    """Products of queries and of keys with `count` vectors of distances, f32 [T, H * count] each, the second only if
    its stride is not 0; places f32 [2 * reach + 1]: the number of the vector for each distance."""

    of_queries: f32.ptr
    queries_stride: u32
    of_keys: f32.ptr
    keys_stride: u32
    places: f32.ptr
    reach: i32
    count: u32


class Entries(NamedTuple):
    """Rows f32 [blocks][places][width], each for a window of `every` tokens, at the place of its last one.

    table: their blocks of each sequence.
    """

    rows: f32.ptr
    table: i32.ptr
    places: u32
    width: u32
    every: u32


class BatchTables(NamedTuple):
    """Rows and keys of the batch; starts: first token of each sequence, lengths: keys that it has."""

    positions: i32.ptr
    sequence_of: i32.ptr
    starts: i32.ptr
    table: i32.ptr
    table_stride: u32
    lengths: i32.ptr
    counts: i32.ptr


class Halves(NamedTuple):
    """Float16 operand of a matrix (weights/operand.py) that results are stored as too, if it is wanted."""

    words: u32.ptr
    scales: f32.ptr
    wanted: u32


class Heads(NamedTuple):
    """Heads of queries and of keys, columns of a key and of a value, tokens of a block of the cache."""

    heads: u32
    kv_heads: u32
    k_dim: u32
    v_dim: u32
    block_size: u32


class Scores(NamedTuple):
    """Numbers that make a product a score, and keys seen by a query (bias.py)."""

    scale: f32
    cap: f32
    causal: u32
    window: i32
    chunk: i32
    n_buckets: u32
    spread: f32
