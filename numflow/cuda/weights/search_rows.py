"""Row headers in kernels: the candidates for a row, and the scales of a row header."""

import functools

from numflow.cuda.lang.arithmetic import float_of
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.quant import search
from numflow.quant.layout import BASE_BIAS, BASE_CODES, BASE_SHIFT, STEP_CODES, WINDOWS, RowScheme

MOST_HEADERS = 160  # most candidates for a row
_HALF, _BASES, _WIDE, _TOPS = 0.5, search.BASES, search.WIDE, search.TOPS


@device
def step_of(code, scale_bits):
    """The value D of a step code, i32."""
    return i32((4 + u32(code & u32(3))) << u32(u32(code >> u32(2)) + 18 - scale_bits))


@device
def scale_of(header, code, scale_bits):
    """The scale of a scale code, for a row header."""
    base = u32((u32(header >> u32(7)) + BASE_BIAS) << u32(BASE_SHIFT))
    return float_of(u32(base + u32(code * step_of(u32(header >> u32(2) & u32(31)), scale_bits))))


@functools.cache
def row_headers_of(scheme: RowScheme) -> DeviceFunction:
    """row_headers(headers, first, last, largest, farthest): write the candidate row headers to an array, and return
    their number."""
    scale_bits, more, codes = scheme.scale_bits, int(scheme.scale_bits <= search.COARSE), 1 << scheme.scale_bits
    fewest = max(1, codes - _TOPS)

    @device
    def first_step(missing, top):
        code = i32(0)
        while code < STEP_CODES - 1 and step_of(u32(code), scale_bits) * top < missing:
            code = i32(code + 1)
        return code

    @device
    def add_windows(headers, count, base, step, window):
        if base >= 1 and base < BASE_CODES:
            for i in range(more + 1):
                if window + i < WINDOWS:
                    headers[count] = u32(base << i32(7) | step << i32(2) | i32(window + i))
                    count = u32(count + 1)
        return count

    @device
    def row_headers(headers, first, last, largest, farthest):
        window, count, wide = i32(0), u32(0), last - first > _WIDE
        while window < WINDOWS - 1 and farthest <= f32(_HALF) * float_of(u32((126 - window) << i32(23))):
            window = i32(window + 1)
        # Grids of scales that begin at the smallest scale, or between it and the largest.
        reach = i32(_WIDE) if wide else i32(last - first)
        for i in range(_BASES + 1):
            base = first if i == 0 else i32(last - reach + reach * (i - 1) // _BASES)
            if wide or (i > 0 and (i <= 1 or more == 1)):
                step = first_step(i32(largest - ((base + BASE_BIAS) << i32(BASE_SHIFT))), i32(codes - 1))
                count = add_windows(headers, count, base, step, window)
                if more == 1 and step > 0:
                    count = add_windows(headers, count, base, i32(step - 1), window)
        # In a row with very different scales, grids that contain both the smallest and the largest scale.
        meeting = i32(fewest) if wide else i32(codes)
        while meeting < codes:
            reaching = first_step(i32((last - first) << i32(BASE_SHIFT)), meeting)
            step = i32(reaching - 1) if reaching > 0 else i32(0)
            while step <= reaching:
                end = i32(((largest - step_of(u32(step), scale_bits) * meeting) >> i32(BASE_SHIFT)) - BASE_BIAS)
                count = add_windows(headers, count, first, step, window)
                count = add_windows(headers, count, i32(first + 1), step, window)
                count = add_windows(headers, count, end, step, window)
                count = add_windows(headers, count, i32(end + 1), step, window)
                step = i32(step + 1)
            meeting = i32(meeting + 1)
        return count

    return row_headers
