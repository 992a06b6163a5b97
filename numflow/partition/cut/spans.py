"""Spans of columns, heads, experts or layers for devices with given shares.

A span is (begin, end); a device with an empty span does not take part in the step. All functions are deterministic.
"""

from collections.abc import Collection
from functools import cache
from itertools import pairwise

Spans = tuple[tuple[int, int], ...]


def even_spans(total: int, shares: tuple[float, ...], unit: int = 1) -> Spans:
    """Spans of `total` items in proportion to the shares; borders are multiples of `unit`, except the last."""
    units, whole, cumulated = -(-total // unit), sum(shares), 0.0
    borders = [0]
    for share in shares[:-1]:
        cumulated += share
        borders.append(min(total, round(units * cumulated / whole) * unit))
    return _between([*borders, total])


def layer_spans(total: int, shares: tuple[float, ...]) -> Spans:
    """As even_spans, but every device gets at least one layer, if there are enough."""
    spans, left, whole = [], total, sum(shares)
    for i, share in enumerate(shares):
        after = len(shares) - i - 1
        count = left if not after else max(1, min(left - after, round(left * share / whole)))
        spans.append((total - left, total - left + count))
        left, whole = left - count, whole - share
    return tuple(spans)


def nearest_spans(spans: Spans, closed: Collection[int]) -> Spans:
    """Non-empty spans with the nearest borders that are not in `closed`; unchanged if there are too few other
    borders."""
    total, wanted = spans[-1][1], [end for _, end in spans[:-1]]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}  # by the last border: distances, borders
    for target in wanted:
        best = {border: min((distance + abs(border - target), (*before, border))
                            for last, (distance, before) in best.items() if last < border)
                for border in range(min(best, default=total) + 1, total) if border not in closed}
    if not best:
        return spans
    return _between([*min(best.values())[1], total])


@cache
def head_spans(heads: int, kv_heads: int, shares: tuple[float, ...], unit: int = 1) -> Spans:
    """Query heads for each device, such that key/value heads are at h // (H / G) on the device too.

    A device has whole groups of H / G query heads, or a part of one group. unit: borders are multiples of this.
    The cut minimises the load per share of the busiest device; among equals, the sum of squared loads.
    """
    group = heads // kv_heads
    whole = sum(shares)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for share in shares:
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for begin, (peak, squares, borders) in best.items():
            for end in range(begin, heads + 1):
                if (end not in (begin, heads) and end % unit) or not _shares_heads(begin, end, group):
                    continue
                size = (end - begin) * whole / (heads * share)
                cost = (round(max(peak, size), 9), round(squares + size * size, 9), (*borders, end))
                if end not in found or cost[:2] < found[end][:2]:
                    found[end] = cost
        best = found
    return _between(best[heads][2])


def kv_spans(spans: Spans, heads: int, kv_heads: int) -> Spans:
    """Key/value heads of query heads in these spans; spans overlap if devices share a head."""
    group = heads // kv_heads
    return tuple((begin // group, -(-end // group)) if end > begin else (begin // group,) * 2 for begin, end in spans)


def scaled(spans: Spans, factor: int) -> Spans:
    """Spans of heads as spans of columns: every border times `factor`."""
    return tuple((begin * factor, end * factor) for begin, end in spans)


def is_aligned(spans: Spans, unit: int) -> bool:
    """Whether every border is a multiple of `unit`."""
    return unit > 0 and all(border % unit == 0 for span in spans for border in span)


def holders(spans: Spans) -> tuple[int, ...]:
    """Indices of the devices whose span is not empty."""
    return tuple(i for i, (begin, end) in enumerate(spans) if end > begin)


def _shares_heads(begin: int, end: int, group: int) -> bool:
    if begin == end:
        return True
    return begin // group == (end - 1) // group or (begin % group == 0 and end % group == 0)


def _between(borders) -> Spans:
    return tuple(pairwise(borders))
