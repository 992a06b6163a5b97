"""Which tokens of which lanes a step runs. Integers only."""

from collections.abc import Callable, Hashable, Sequence

from numflow.engine.schedule.sequence import Group, Lane, Span


def choose_spans(running: Sequence[Group], output: str, limits, next_block: Callable[[Lane], Hashable]) -> list[Span]:
    """The spans of a step, for the running groups that want this output, in their order.

    First what generates: of every lane the last known token and its drafts; the drafts are the first to be cut. Then
    pieces of prompts with what is left of the budget. A request of several lanes goes on when all of them are ready.

    limits:     numflow.engine.schedule.scheduler.Limits.
    next_block: lets a lane take over tokens that have run elsewhere, and names the block that comes next, None if it is
                of no use to others. Of lanes with the same one only the first runs it; the others will take it over.
    """
    groups = [group for group in running if group.output == output and (group.encoded or not group.encoder)]
    upcoming = {lane: next_block(lane) for group in groups for lane in group.lanes if lane.pending > 1}
    ready = [group for group in groups if not group.every_row and all(lane.pending == 1 for lane in group.lanes)]
    lanes = [lane for group in ready for lane in group.lanes]
    spare = max(0, limits.tokens - len(lanes))
    spans = []
    for lane in lanes:
        drafts = lane.drafts[:spare]
        spare -= len(drafts)
        spans.append(Span(lane, lane.length, 1 + len(drafts), range(1 + len(drafts)), drafts))
    spare = max(1, limits.tokens - sum(span.count for span in spans))
    rows, claimed = max((group.every_row for group in groups), default=0), set()
    for group in groups:
        if group in ready:
            continue
        for lane in group.lanes:
            if spare <= 0 or (group.every_row and rows <= 0):
                return spans
            block = upcoming.get(lane)
            if block is not None and block in claimed:
                continue
            if span := _piece(lane, spare, rows, limits.chunk, alone=not spans):
                claimed.add(block)
                spare -= span.count
                rows -= len(span.rows) if group.every_row else 0
                spans.append(span)
    return spans


def _piece(lane: Lane, spare: int, rows: int, chunk: int, alone: bool) -> Span | None:
    """What of a lane's known tokens runs now. Lanes of several wait with their last one."""
    group = lane.group
    due = lane.pending if len(group.lanes) == 1 else lane.pending - 1
    count = min(due, spare, chunk, lane.room, rows if group.every_row else due)
    if group.whole:
        count = due if alone or due <= spare else 0
    if count <= 0:
        return None
    if group.every_row:
        wanted = range(count)
    else:
        wanted = range(count - 1, count) if count == lane.pending else range(0)
    return Span(lane, lane.length, count, wanted, [])
