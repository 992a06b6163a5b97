"""Argument slots of the attention kernels, and the layout of their scratch memory."""

from numflow.cpu.runtime.kernel import slots
from numflow.cpu.simd.isa import isa
from numflow.cpu.state.cache import CHUNK
from numflow.quant.kv import BLOCK as BLOCK_COLUMNS

SPAN = 128  # keys of a partial result
# Vectors of columns per register tile, by number of rows: all accumulators stay in registers, and there are enough of
# them to hide the latency of the fused multiply-adds.
WIDTHS = {8: 2, 6: 4, 4: 4, 3: 4, 2: 4, 1: 4} if isa() == "avx512" else {4: 1, 3: 1, 2: 2, 1: 4}
MAX_ROWS = max(WIDTHS)
HEIGHTS, COLUMNS = tuple(WIDTHS), tuple(WIDTHS.values())

# Arguments of the attention kernels.
# table, table_stride, lengths: fields of the batch header.
# decoded, transposed: offsets in a thread's scratch of a chunk of floats, and of values made of the keys' prefix.
# c2p, p2c: products of queries and of keys with relative-position embeddings. bucket_table, bucket_reach: bucket of
# each relative position -reach .. reach. n_buckets: buckets per head.
# every: tokens per entry, of a cache of entries, else 0.
# selected_block: keys per bit of `selected`, whose rows have selected_words words for each key head; 0: a bit per key.
# sums: f32 [T, H, 2] for the maximum and the sum of exponentials of each row and head, or 0.
SLOTS = slots("""
    header q q_stride y y_stride cache kv_heads queries_per_key k_dim v_dim block_size table table_stride lengths
    scale causal window softcap slopes sinks bias reach scratch scratch_bytes partials max_slots counters decoded
    k_kind v_kind k_width v_width k_size v_size transposed chunk selected selected_stride c2p c2p_stride p2c p2c_stride
    bucket_table bucket_reach n_buckets every selected_block selected_words sums""")
# Join of two attentions of a row. sums, other_sums: f32 [T, H, 2], maximum and sum of exponentials of each of the two.
JOIN = slots("header rows y y_stride other other_stride sums other_sums heads width")

RELATIVE = ("c2p", "c2p_stride", "p2c", "p2c_stride", "bucket_table", "bucket_reach", "n_buckets")

# index_select, block_select. words: 32-bit words per row of bits, or per head of a row. kind, width, row: type, columns
# and bytes of a cached key. scratch, per thread: the scores of a row, or of the blocks of each head; from offset
# `rotated` on its rotated queries, then codes and floats of 16 keys.
INDEX = slots("""
    header rows q q_stride weights weights_stride y y_stride words cache table table_stride block_size heads size
    kind width row top_k scratch scratch_bytes rotated every block local""")
# index_tokens. words: 32-bit words per row of y.
TOKENS = slots("header rows x x_stride y y_stride words every")

# A thread's scratch memory, offsets in bytes. Arrays by row are int64 [8] unless noted.
SCORES = 0                 # f32 [8][64], overwritten by the probabilities
LANE_SUMS = 2048           # f32 [8][16], sum of exponentials by lane
RUNNING_MAX, NEXT_MAX = 2560, 2624  # f32 [16], one lane per row
FACTOR, OTHER_FACTOR = 2688, 2752   # f32 [16], one lane per row
FIRST_KEY, LAST_KEY = 2816, 2880    # first and last visible key of a row
POSITION, HEAD, Y_ADDRESS = 2944, 3008, 3072  # of a row
SELECTED = 3136            # of a row: bit i is set if it sees key i of the chunk
# Partial result of a span, then the total of the tile, then q * scale, f32 [rows][E], then a decoded chunk.
SPAN_RESULT = QUERIES = 3200

# A partial result: f32 maximum m [16], sum of exponentials l [16], values [8][Ep].
MAXIMA, EXP_SUMS, VALUES = 0, 64, 128

# A thread's memory of int8.py: quantised probabilities, scales and minima of values, blocks of queries, codes.
INT8_ROWS = 8
INT8_WEIGHTS = INT8_ROWS * 2 * CHUNK
INT8_TABLE = INT8_WEIGHTS + 8 * INT8_ROWS
INT8_OPERAND = INT8_TABLE + 8 * CHUNK
INT8_OPERAND_BLOCK = INT8_ROWS * (2 * BLOCK_COLUMNS + 8)

# Most partial results; with more (tile, span) pairs, tiles are not split.
MAX_SLOTS = 4096
TILES_PER_THREAD = 4  # with fewer tiles, threads share the spans of tiles
# Byte offsets in the counters: next item, number of finished threads, finished spans of each tile.
NEXT, DONE, SPANS_DONE = 0, 64, 128


def slot_bytes(v_width: int) -> int:
    """Bytes of a partial result."""
    return VALUES + MAX_ROWS * 4 * v_width


def scratch_bytes(k_width: int, v_width: int) -> tuple[int, int, int]:
    """Bytes of a thread's scratch memory, whole cache lines: without a decoded chunk, with one, and with one and the
    values made of its keys."""
    base, width = SPAN_RESULT + 2 * slot_bytes(v_width) + -(-k_width * MAX_ROWS * 4 // 64) * 64, max(k_width, v_width)
    decoded = base + CHUNK * 4 * width + int8_bytes(k_width, width)
    return base, decoded, decoded + CHUNK * 4 * v_width


def int8_bytes(k_width: int, width: int) -> int:
    """Bytes of a thread's memory of int8.py, for keys of `k_width` columns and chunks of at most `width` columns."""
    return INT8_OPERAND + INT8_OPERAND_BLOCK * (k_width // BLOCK_COLUMNS + 1) + CHUNK * width
