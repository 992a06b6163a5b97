"""Arguments of the attention kernels, and the layout of their memory."""

from numflow.cpu.runtime.kernel import slots
from numflow.cpu.simd.isa import isa
from numflow.cpu.state.cache import CHUNK
from numflow.quant.kv import BLOCK as BLOCK_COLUMNS

SPAN = 128  # keys whose partial result may be taken apart from the others'
# Vectors of columns that are summed at a time, by number of rows: what keeps all sums in registers, and enough of them
# under way.
WIDTHS = {8: 2, 6: 4, 4: 4, 3: 4, 2: 4, 1: 4} if isa() == "avx512" else {4: 1, 3: 1, 2: 2, 1: 4}
MOST_ROWS = max(WIDTHS)
HEIGHTS, COLUMNS = tuple(WIDTHS), tuple(WIDTHS.values())

# Arguments of the attention kernels. table, table_stride, lengths: fields of the batch header. In a thread's scratch,
# decoded: where a chunk of floats lies; turned: where keys become the values that are a prefix of them. of_queries, ...
# far: products with vectors of distances, the number of each distance, and how many a head has. every: of a cache of
# entries, else 0. sums: where the largest score and the sum of each row and head go, f32 [T, H, 2], or 0.
SLOTS = slots("""
    header q q_stride y y_stride cache kv_heads queries_per_key k_dim v_dim block_size table table_stride lengths
    scale causal window softcap slopes sinks bias reach scratch scratch_bytes partials most_slots counters decoded
    k_kind v_kind k_width v_width k_size v_size turned chunk chosen chosen_stride of_queries of_queries_stride of_keys
    of_keys_stride places places_reach far every sums""")
# Of the join of two attentions of a row; sums, more: f32 [T, H, 2], the largest score and the sum of the probabilities.
JOIN = slots("header rows y y_stride other other_stride sums more heads width")

FAR = ("of_queries", "of_queries_stride", "of_keys", "of_keys_stride", "places", "places_reach", "far")

# Of index_select; words: of a row of bits. kind, width, row: of keys in the cache. scratch, for each thread: scores of
# a row; from `turned` on its queries as keys of few bits are rotated, their codes, and 16 such keys as floats.
INDEX = slots("""
    header rows q q_stride weights weights_stride y y_stride words cache table table_stride block_size heads size
    kind width row top_k scratch scratch_bytes turned every""")

# A thread's scratch memory, offsets in bytes: [8] rows are int64 where not said otherwise.
SCORES = 0                 # f32 [8][64], then the probabilities
SUMS = 2048                # f32 [8][16], l by lane
PEAK, NEXT_PEAK = 2560, 2624  # f32 [16], one lane for each row
FACTOR, OTHER_FACTOR = 2688, 2752
FIRST, LAST = 2816, 2880   # keys the row sees
POSITION, HEAD, WHERE = 2944, 3008, 3072  # of the row; address of its y
OWN = QUERIES = 3136       # partial result of a span, then the total, then q * scale, f32 [rows][E], then a chunk

# A partial result: f32 m[16], l[16], values [8][Ep].
PEAKS, TOTALS, VALUES = 0, 64, 128

# A region of int8.py: weights of values, their scales and minima, then blocks of queries, then codes.
INT8_ROWS = 8
INT8_WEIGHTS = INT8_ROWS * 2 * CHUNK
INT8_TABLE = INT8_WEIGHTS + 8 * INT8_ROWS
INT8_OPERAND = INT8_TABLE + 8 * CHUNK
INT8_OPERAND_BLOCK = INT8_ROWS * (2 * BLOCK_COLUMNS + 8)

# Partial results there is room for; at most this many (tile, span) pairs are taken apart.
MOST_SLOTS = 4096
TILES_PER_THREAD = 4  # with fewer tiles than this, spans are shared out
# Byte offsets in the counters: the next item, threads that are done, spans done of each tile.
NEXT, DONE, SPANS_DONE = 0, 64, 128


def slot_bytes(v_width: int) -> int:
    """Bytes of a partial result."""
    return VALUES + MOST_ROWS * 4 * v_width


def scratch_bytes(k_width: int, v_width: int) -> tuple[int, int, int]:
    """Bytes of a thread's scratch memory, whole cache lines: plain, with room for a decoded chunk, and with room for
    one whose keys are turned into values."""
    plain, width = OWN + 2 * slot_bytes(v_width) + -(-k_width * MOST_ROWS * 4 // 64) * 64, max(k_width, v_width)
    decoded = plain + CHUNK * 4 * width + int8_bytes(k_width, width)
    return plain, decoded, decoded + CHUNK * 4 * v_width


def int8_bytes(k_width: int, width: int) -> int:
    """Bytes of a region of int8.py for keys of `k_width` columns and chunks of at most `width`."""
    return INT8_OPERAND + INT8_OPERAND_BLOCK * (k_width // BLOCK_COLUMNS + 1) + CHUNK * width
