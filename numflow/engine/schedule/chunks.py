"""Choice of the tokens that a step runs, sequence by sequence. Integers only."""

from numflow.engine.schedule.limits import StepLimits
from numflow.engine.schedule.reuse import Reuse
from numflow.engine.schedule.sequence import ScheduledChunk, Sequence, SequenceGroup


def choose_chunks(running: list[SequenceGroup], output: str, limits: StepLimits, reuse: Reuse) -> list[ScheduledChunk]:
    """The chunks of a step, for the running groups that want this output, in their order.

    First what generates: of every sequence the last known token and its drafts; the drafts are the first to be cut.
    Then pieces of prompts with what is left of the budget. A request of several sequences goes on when all of them are
    ready.

    reuse: lets a sequence take over tokens that have run elsewhere, and names the block that comes next, None if it is
           of no use to others. Of sequences with the same one only the first runs it; the others will take it over.
    """
    groups = [group for group in running if group.output == output and (group.encoded or not group.encoder)]
    upcoming = {sequence: reuse.next_block(sequence) for group in groups for sequence in group.sequences
                if sequence.pending > 1}
    ready = [group for group in groups
             if not group.every_row and all(sequence.pending == 1 for sequence in group.sequences)]
    sequences = [sequence for group in ready for sequence in group.sequences]
    spare = max(0, limits.tokens - len(sequences))
    chunks = []
    for sequence in sequences:
        drafts = sequence.drafts[:spare]
        spare -= len(drafts)
        chunks.append(ScheduledChunk(sequence, sequence.length, 1 + len(drafts), range(1 + len(drafts)), drafts))
    spare = max(1, limits.tokens - sum(chunk.count for chunk in chunks))
    rows, claimed = max((group.every_row for group in groups), default=0), set()
    for group in groups:
        if group in ready:
            continue
        for sequence in group.sequences:
            if spare <= 0 or (group.every_row and rows <= 0):
                return chunks
            block = upcoming.get(sequence)
            if block is not None and block in claimed:
                continue
            if chunk := _piece(sequence, spare, rows, reuse.piece(sequence), alone=not chunks):
                claimed.add(block)
                spare -= chunk.count
                rows -= len(chunk.rows) if group.every_row else 0
                chunks.append(chunk)
    return chunks


def _piece(sequence: Sequence, spare: int, rows: int, chunk: int, alone: bool) -> ScheduledChunk | None:
    """Chunk of a sequence's known tokens that runs now. In a group of several, each holds back its last token."""
    group = sequence.group
    due = sequence.pending if len(group.sequences) == 1 else sequence.pending - 1
    count = min(due, spare, chunk, sequence.room, rows if group.every_row else due)
    if group.whole:
        count = due if alone or due <= spare else 0
    if count <= 0:
        return None
    if group.every_row:
        wanted = range(count)
    else:
        wanted = range(count - 1, count) if count == sequence.pending else range(0)
    return ScheduledChunk(sequence, sequence.length, count, wanted, [])
