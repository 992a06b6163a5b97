"""Chunked prefill: choice of the tokens of each sequence that run in a step. Integers only."""

from numflow.engine.schedule.limits import StepLimits
from numflow.engine.schedule.reuse import Reuse
from numflow.engine.schedule.sequence import ScheduledChunk, Sequence, SequenceGroup


def choose_chunks(running: list[SequenceGroup], output: str, limits: StepLimits, reuse: Reuse) -> list[ScheduledChunk]:
    """Chunks of a step, for the running groups with this output, in their order.

    Decoding sequences come first: the last token and the drafts of each; drafts are cut first if the token budget is
    short. Chunks of prompts get the rest of the budget. A group of several sequences decodes when all of them are
    ready.

    reuse: takes blocks that other sequences have run, and returns the key of the next block. If several sequences have
           the same next block, only the first of them runs it; the others take it from the prefix cache afterwards.
    """
    groups = [group for group in running if group.output == output and (group.encoded or not group.encoder)]
    next_blocks = {sequence: reuse.next_block(sequence) for group in groups for sequence in group.sequences
                   if sequence.pending > 1}
    ready = [group for group in groups
             if not group.every_row and all(sequence.pending == 1 for sequence in group.sequences)]
    sequences = [sequence for group in ready for sequence in group.sequences]
    budget = max(0, limits.tokens - len(sequences))
    chunks = []
    for sequence in sequences:
        drafts = sequence.drafts[:budget]
        budget -= len(drafts)
        chunks.append(ScheduledChunk(sequence, sequence.length, 1 + len(drafts), range(1 + len(drafts)), drafts))
    budget = max(1, limits.tokens - sum(chunk.count for chunk in chunks))
    rows, claimed = max((group.every_row for group in groups), default=0), set()
    for group in groups:
        if group in ready:
            continue
        for sequence in group.sequences:
            if budget <= 0 or (group.every_row and rows <= 0):
                return chunks
            block = next_blocks.get(sequence)
            if block is not None and block in claimed:
                continue
            if chunk := _prompt_chunk(sequence, budget, rows, reuse.max_chunk(sequence), alone=not chunks):
                claimed.add(block)
                budget -= chunk.count
                rows -= len(chunk.rows) if group.every_row else 0
                chunks.append(chunk)
    return chunks


def _prompt_chunk(sequence: Sequence, budget: int, rows: int, chunk: int, alone: bool) -> ScheduledChunk | None:
    """Next chunk of a prompt, None if no token runs now. In a group of several sequences each keeps its last token
    back."""
    group = sequence.group
    pending = sequence.pending if len(group.sequences) == 1 else sequence.pending - 1
    count = min(pending, budget, chunk, sequence.spare_tokens, rows if group.every_row else pending)
    if group.whole:
        count = pending if alone or pending <= budget else 0
    if count <= 0:
        return None
    if group.every_row:
        wanted = range(count)
    else:
        wanted = range(count - 1, count) if count == sequence.pending else range(0)
    return ScheduledChunk(sequence, sequence.length, count, wanted, [])
