"""GEMM on tensor cores for many tokens: tiles of 128 rows of the matrix times 16 to 128 tokens, 32 columns a step.

Weights of any type are converted to float16 (bfloat16 if the file has bfloat16) on their way to shared memory.
Activations are the float16 operand of operand.py. Accumulation is float32. While a tile is multiplied, the next one is
loaded: activations by cp.async, weights to registers, one row for each thread.

    y[t, n] = sum over k of (SCALE * w[n, k]) * (x[t, k] / s[t])  *  s[t] / SCALE + bias[n]

SCALE keeps small weights out of the subnormal range of float16. If few tokens would leave multiprocessors idle, the
columns are split into parts (split-K), whose sums a second kernel adds in a fixed order.

Quantised matrices without outliers use few_gemm.py for up to 16 tokens.

Outliers are added to the weights of a tile, as float16, by the thread that has their row (outliers.py).

Grouped: the matrix is a stack of the experts' matrices. A block looks up its expert in `tiles`, and its tokens among
the routes in `order` (moe/group.py).
"""

import functools

from numflow.cuda.lang.arithmetic import (
    fma_halves,
    load_matrices,
    mma_bf16,
    mma_f16,
    pack_halves,
    prmt,
    sub_halves,
)
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    block_z,
    copy_async,
    copy_commit,
    copy_wait,
    grid_z,
    lane_index,
    load2,
    load4,
    store4,
    stream4,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear import few_gemm
from numflow.cuda.linear.parameters import Bias, Planes, Residual, Shape
from numflow.cuda.weights.decode import header, numbers_of, pair_header, reader
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES, Scheme
from numflow.cuda.weights.operand import half_place
from numflow.cuda.weights.outliers import first_of, into_tile

ROWS = 128              # rows of the matrix that a block has
TOKENS = (16, 64, 128)  # tokens that a block may have
SCALE = 64.0
PITCH = 20              # words from one row of a tile to the next: 16 of data and 4 of padding against bank conflicts
BLOCKS = {16: 660, 64: 396, 128: 264}  # blocks that fill a large GPU, by tokens: the occupancy that registers allow,
                        # times 132 multiprocessors; a single block mostly waits for memory
_MAGIC = 0x64006400     # two float16 of value 1024: the lowest mantissa bit is worth 1


def is_few(kind: str, tokens: int, apart: bool) -> bool:
    """Whether the kernel for tiles of this many tokens is in few_gemm.py. apart: the matrix has outliers."""
    return tokens == few_gemm.TOKENS and kind in SCHEMES and not apart


def rows_of(kind: str, tokens: int, apart: bool) -> int:
    """Number of rows of the matrix that a block has."""
    return few_gemm.ROWS if is_few(kind, tokens, apart) else ROWS


def split_of(kind: str, apart: bool, n: int, rows: int, units: int) -> int:
    """Number of parts into which the columns are split."""
    tokens = tile_of(rows)
    if is_few(kind, tokens, apart):
        return few_gemm.split_of(n, rows, units)
    tiles = -(-n // ROWS) * -(-rows // tokens)
    return max(1, min(BLOCKS[tokens] // tiles, units // 8, 16))


def partial_sums() -> int:
    """Largest number of partial sums, for the size of the scratch memory."""
    return ROWS * max(tokens * blocks for tokens, blocks in BLOCKS.items())


def tile_of(rows: int) -> int:
    """Tokens of a block, for a batch of `rows` tokens."""
    return next((tokens for tokens in TOKENS if tokens >= rows), TOKENS[-1])


def few(kind: str, n: int, grouped: bool = False, gate: str = "") -> Kernel:
    """The kernel of few_gemm.py for a matrix of n rows, if `is_few`."""
    return few_gemm.few_gemm(kind, grouped, few_gemm.warps_of(n, grouped or bool(gate)), SCALE, _code_stage(kind), gate)


@functools.cache
def gemm(kind: str, tokens: int, grouped: bool = False, apart: bool = False) -> Kernel:
    """Grid (N / rows_of, rows / tokens, parts). If parts > 1, sums are written to `partial` f32 [parts, rows, N].

    x: the operand "f16" or "bf16" of operand.py; scales f32 [T]. grouped: grid (N / rows_of, tiles, 1); x has one row
    for each route, or (by_token) for each token. apart: the matrix has outliers, `outliers` slots in a row.
    """
    bfloat = kind == "bf16"
    multiply, stage = mma_bf16 if bfloat else mma_f16, _float_stage if kind in ("f16", "bf16") else _code_stage(kind)
    inverse = 1.0 if kind in ("f16", "bf16") else 1.0 / SCALE
    has_rows = kind in SCHEMES and SCHEMES[kind].row_words > 0
    row_of = row_header(SCHEMES[kind]) if has_rows else None
    across = 2 if tokens == 128 else 1       # warps side by side along the tokens
    m_tiles, n_tiles = 2 * across, tokens // across // 8
    w_words, x_words = ROWS * PITCH, tokens * PITCH
    w_memory, x_memory = SharedArray(u32, 2 * w_words), SharedArray(u32, 2 * x_words)
    sums, staged = LocalArray(f32, m_tiles * n_tiles * 4), LocalArray(u32, 16)
    left, right = LocalArray(u32, 4 * m_tiles), LocalArray(u32, 2 * n_tiles)
    put = put_sums(m_tiles, n_tiles, inverse, grouped)
    chunks = max(tokens * 4 // 128, 1)       # of 16 bytes of activations that each thread copies
    sources, plus = LocalArray(u32, chunks), LocalArray(f32, 2 * m_tiles)

    @kernel(f"gemm_{kind}_{tokens}{'_apart' * apart}{'_grouped' * grouped}", 128, blocks=1 if tokens == 128 else 2)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, slots: u32.ptr, outliers: u32):
        # Block indices: a tile of rows and tokens. Grouped: the tile's expert and routes.
        thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
        first_row, first_token, count = u32(block_x() * 128), u32(block_y() * tokens), u32(shape.counts[shape.field])
        above_row = u32(0)                   # rows of the matrix before the expert's
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # The units of this part.
        parts = u32(grid_z())
        share = u32((shape.units + parts - 1) // parts)
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < shape.units else shape.units
        # Registers and shared memory; the row that this thread decodes, and the tokens that it copies.
        w_tile, x_tile = w_memory(), x_memory()
        acc, words, a, b = sums(), staged(), left(), right()
        for i in range(m_tiles * n_tiles * 4):
            acc[i] = f32(0)
        row = u32(first_row + thread) if first_row + thread < shape.n else u32(shape.n - 1)
        row = u32(above_row + row)
        rows_of = sources()
        for i in range(chunks):
            at = u32(first_token + (thread + 128 * i >> 2))
            at = at if at < count else u32(count - 1)  # tokens beyond the batch repeat the last one
            rows_of[i] = u32(order[2 * at + by_token]) if grouped else at
        # The header of the row, and its first outlier.
        base, step, z, dz = u32(0), u32(0), f32(0), f32(0)
        if has_rows:
            base, step, z, dz = row_of(planes.per_row, row)
        slot, end, word = u32(row * outliers), u32((row + 1) * outliers), u32(0)
        if apart:
            slot, word = first_of(slots, slot, end, unit)
        # Addresses for ldmatrix.
        m_first, n_first = u32(warp // across * (16 * m_tiles)), u32(warp % across * (8 * n_tiles))
        # Lane l gives the address of row l % 8 of 8x8 matrix l // 8. Weights: rows and rows + 8 of columns k, then of
        # k + 8. Tokens: columns k and k + 8 of the first 8 tokens, then of the next 8.
        matrix, inside = lane >> u32(3), lane & u32(7)
        w_lane = u32((m_first + inside + 8 * (matrix & u32(1))) * PITCH + 4 * (matrix >> u32(1)))
        x_lane = u32((n_first + inside + 8 * (matrix >> u32(1))) * PITCH + 4 * (matrix & u32(1)))
        # Load the first tile to shared memory: tokens by cp.async, weights decoded; barrier.
        if unit < last:
            stage(words, planes.low, planes.high, planes.two, planes.one, planes.head, planes.above, row, unit,
                  shape.units, base, step, z, dz)
            _copy_tokens(x_tile, 0, x, rows_of, unit, shape.units, thread, chunks, tokens)
            _put(w_tile, u32(thread * PITCH), words)
            if apart:
                slot, word = into_tile(w_tile, u32(thread * PITCH), slots, slot, end, word, unit, f32(SCALE))
            copy_wait()
        sync_block()
        # For each unit: load the next one to registers and the other half of shared memory ...
        turn = u32(0)
        while unit < last:
            more = unit + 1 < last
            if more:
                _copy_tokens(x_tile, u32((turn ^ u32(1)) * x_words), x, rows_of, u32(unit + 1), shape.units, thread,
                             chunks, tokens)
                stage(words, planes.low, planes.high, planes.two, planes.one, planes.head, planes.above, row,
                      u32(unit + 1), shape.units, base, step, z, dz)
            # ... while tensor cores multiply this one: ldmatrix, mma.
            for k in range(2):
                for m in range(m_tiles):
                    at = u32(turn * w_words + w_lane + 16 * PITCH * m + 8 * k)
                    a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3] = load_matrices(w_tile, at)
                for pair in range(n_tiles // 2):
                    at = u32(turn * x_words + x_lane + 16 * PITCH * pair + 8 * k)
                    b[4 * pair], b[4 * pair + 1], b[4 * pair + 2], b[4 * pair + 3] = load_matrices(x_tile, at)
                for m in range(m_tiles):
                    for j in range(n_tiles):
                        c = 4 * (m * n_tiles + j)
                        acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = multiply(
                            a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3], b[2 * j], b[2 * j + 1],
                            acc[c], acc[c + 1], acc[c + 2], acc[c + 3])
            # Store the next weights to shared memory; barrier.
            turn = u32(turn ^ u32(1))
            if more:
                _put(w_tile, u32(turn * w_words + thread * PITCH), words)
                if apart:
                    slot, word = into_tile(w_tile, u32(turn * w_words + thread * PITCH), slots, slot, end, word,
                                           u32(unit + 1), f32(SCALE))
                copy_wait()
            sync_block()
            unit = u32(unit + 1)
        # Epilogue: scale, bias, y; or for several parts the sums that gemm_sum adds.
        lane_row, lane_token = u32(first_row + m_first + (lane >> u32(2))), u32(n_first + 2 * (lane & u32(3)))
        own, place = plus(), u32(first_token + lane_token)
        load_bias(own, bias.data + above_row if grouped and bias.present != 0 else bias.data,
                   bias.present != 0 and parts == 1, lane_row, shape.n, m_tiles, 16)
        if not grouped and parts > 1:
            put(acc, partial + block_z() * count * shape.n, shape.n, scales, own, shape.n, count, lane_row, place,
                order, by_token)
        else:
            put(acc, *y, scales, own, shape.n, count, lane_row, place, order, by_token)

    return _gemm


@device
def _copy_tokens(tile, at, x, rows_of, unit, units, thread, chunks, tokens):
    """Copy 32 columns of each token to shared memory by cp.async. rows_of: rows of x that this thread copies."""
    for i in range(chunks):
        place = u32(thread + 128 * i)
        if place < tokens * 4:
            token, part = place >> u32(2), place & u32(3)
            copy_async(tile, u32(at + token * PITCH + 4 * part), x, half_place(rows_of[i], unit, part, units))
    copy_commit()


@device
def _put(tile, at, words):
    """Write 16 words of a row to the tile."""
    for i in range(4):
        store4(tile, u32(at + 4 * i), words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])


@device
def _float_stage(words, low, high, two, one, head, above, row, unit, units, base, step, z, dz):
    """Load 32 halves of a row of a float matrix; `low` is the matrix."""
    at = u32((row * units + unit) * 16)
    for i in range(4):
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = stream4(low, u32(at + 4 * i))


@functools.cache
def _code_stage(kind: str) -> DeviceFunction:
    """stage(words, ...): decode 32 weights of a row to halves, times SCALE."""
    codes, fetch, numbers = LocalArray(u32, 8), code_fetch(kind), code_halves(kind)

    @device
    def stage(words, low, high, two, one, head, above, row, unit, units, base, step, z, dz):
        bytes_ = codes()
        a, c, a16, c16 = fetch(bytes_, low, high, two, one, head, above, row, unit, units, base, step, z, dz)
        numbers(words, bytes_, a, c, a16, c16)

    return stage


@functools.cache
def code_fetch(kind: str) -> DeviceFunction:
    """fetch(codes, ...) -> a, c, a16, c16: load the codes of a unit, 8 words of 4; return the scale and shift of each
    of its halves."""
    scheme: Scheme = SCHEMES[kind]
    read, head_of, in_codes = reader(scheme), header(scheme), scheme.in_codes

    @device
    def fetch(codes, low, high, two, one, head, above, row, unit, units, base, step, z, dz):
        at = u32(row * units + unit)
        if in_codes:
            p, q, _, _ = stream4(low, u32(4 * at))
            a, c = pair_header(p, q, base, step, z, dz)
            a16, c16 = a, c
        else:
            a, c, a16, c16 = head_of(head, above, at, base, step, z, dz)
        read(codes, low, high, two, one, at)
        return a, c, a16, c16

    return fetch


@functools.cache
def code_halves(kind: str) -> DeviceFunction:
    """halves(words, codes, a, c, a16, c16): convert 32 codes to halves, times SCALE.

    The float16 with bits 0x6400 | code is 1024 + code, for codes below 1024.
    """
    scheme: Scheme = SCHEMES[kind]
    numbers, floats = numbers_of(scheme), bool(scheme.table)

    @device
    def halves(words, codes, a, c, a16, c16):
        factor, shift = pack_halves(a * f32(SCALE), a * f32(SCALE)), pack_halves(c * f32(SCALE), c * f32(SCALE))
        factor16 = pack_halves(a16 * f32(SCALE), a16 * f32(SCALE))
        shift16 = pack_halves(c16 * f32(SCALE), c16 * f32(SCALE))
        for g in range(8):
            by, plus = (factor, shift) if g < 4 else (factor16, shift16)
            if floats:
                w0, w1, w2, w3 = numbers(codes[g])
                words[2 * g] = fma_halves(pack_halves(w0, w1), by, u32(0))
                words[2 * g + 1] = fma_halves(pack_halves(w2, w3), by, u32(0))
                continue
            even, odd = prmt(codes[g], u32(0x64646464), u32(0x4140)), prmt(codes[g], u32(0x64646464), u32(0x4342))
            words[2 * g] = fma_halves(sub_halves(even, u32(_MAGIC)), by, plus)
            words[2 * g + 1] = fma_halves(sub_halves(odd, u32(_MAGIC)), by, plus)

    return halves


@device
def load_bias(plus, bias, wanted, row, n, m_tiles, pitch):
    """Load the bias of rows `row` and `row` + 8 of each m tile, `pitch` rows apart; zeros if not `wanted`."""
    for m in range(m_tiles):
        plus[2 * m], plus[2 * m + 1] = f32(0), f32(0)
        if wanted and row + pitch * m < n:
            plus[2 * m] = bias[row + pitch * m]
        if wanted and row + pitch * m + 8 < n:
            plus[2 * m + 1] = bias[row + pitch * m + 8]


def put_sums(m_tiles: int, n_tiles: int, inverse: float, grouped: bool, pitch: int = 16) -> DeviceFunction:
    """put(acc, y, ...): write the sums of a warp. pitch: rows from one m tile to the next.

    It is a chain of functions, one for each j, so that all indices are constants and the sums stay in registers.
    """

    def for_tokens(j: int) -> DeviceFunction:
        @device
        def put(acc, y, y_pitch, scales, plus, n, count, row, token, order, by_token):
            for i in range(2):
                t = u32(token + 8 * j + i)
                if t < count:
                    source = t
                    if grouped:
                        route, token_of = load2(order, u32(2 * t))
                        t = u32(route)
                        source = u32(token_of) if by_token != 0 else t
                    scale, to = scales[source] * f32(inverse), y + t * y_pitch
                    for m in range(m_tiles):
                        above, below = u32(row + pitch * m), u32(row + pitch * m + 8)
                        if above < n:
                            to[above] = acc[4 * (m * n_tiles + j) + i] * scale + plus[2 * m]
                        if below < n:
                            to[below] = acc[4 * (m * n_tiles + j) + 2 + i] * scale + plus[2 * m + 1]
        return put

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def put(acc, y, y_pitch, scales, plus, n, count, row, token, order, by_token):
            first(acc, y, y_pitch, scales, plus, n, count, row, token, order, by_token)
            second(acc, y, y_pitch, scales, plus, n, count, row, token, order, by_token)
        return put

    return functools.reduce(both, map(for_tokens, range(n_tiles)))


@kernel("gemm_sum", 128)
def gemm_sum(y: Rows, partial: f32.ptr, parts: u32, bias: Bias, residual: Residual, shape: Shape):
    """Add the parts of each sum, the bias and the residual. Grid (N / 128, rows)."""
    row, column, count = u32(block_y()), u32(block_x() * 128 + thread_index()), u32(shape.counts[shape.field])
    if row >= count or column >= shape.n:
        return
    total, part = f32(0), u32(0)
    while part < parts:
        total += partial[(part * count + row) * shape.n + column]
        part = u32(part + 1)
    if bias.present != 0:
        total += bias.data[column]
    if residual.present != 0:
        total = residual.data[row * residual.stride + column] + residual.factor * total
    y.data[row * y.stride + column] = total
