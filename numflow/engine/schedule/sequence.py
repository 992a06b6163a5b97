"""Sequences, the groups of a request's sequences, and the plan of one step. Integers only."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from numflow.engine.schedule.blocks import BlockTable
from numflow.engine.schedule.prefix import START
from numflow.network.windows import STATE

NO_ADAPTER = -1  # as Batch.adapters has it


class Sequence:
    """One sequence of tokens.

    ids:    all tokens that are known. length: number of tokens whose keys and values are cached, in the blocks of
            `tables`, one for each pool.
    drafts: draft tokens behind `ids`; forgotten when they have run.
    tried:  number of drafts that ran in the last step.
    node, registered: the prefix cache's node of the first `registered` blocks. border: blocks of its beginning that it
            has in common with another text.
    """

    __slots__ = ("border", "drafts", "group", "ids", "length", "node", "registered", "tables", "tried")

    def __init__(self, group: "SequenceGroup", ids: list[int], *tables: BlockTable):
        self.group, self.ids, self.tables, self.length = group, ids, tables, 0
        self.drafts: list[int] = []
        self.node, self.registered, self.border = group.root, 0, 0
        self.tried = 0

    @property
    def table(self) -> BlockTable:
        """The blocks of the first pool."""
        return self.tables[0]

    @property
    def swapped(self) -> list[int]:
        """Blocks in the host's memory that hold its keys and values, of the first pool, while it is swapped out."""
        return self.table.swapped

    @property
    def room(self) -> int:
        """Tokens that its tables have blocks for, behind those that have run."""
        return min(table.room for table in self.tables) - self.length

    def due(self, table: BlockTable, chunk: int) -> int:
        """Tokens that a table must have room for now, if up to `chunk` of a prompt run in a step. Blocks of a window
        are taken as they are needed, since those before them are given back by then."""
        known = len(self.ids) + len(self.drafts)
        return min(known, self.length + max(chunk, 1 + len(self.drafts))) if table.window else known

    @property
    def recurrent(self) -> bool:
        """Whether it has a state, which drafts that were wrong cannot be taken out of."""
        return self.tables[-1].window == STATE

    def is_worth(self, length: int) -> bool:
        """Whether a snapshot of its state after so many tokens is worth memory: of its prompt, which others may begin
        with; those of what it writes are the first to be overwritten."""
        return length <= len(self.group.prompt)

    @property
    def pending(self) -> int:
        """Known tokens that have not run."""
        return len(self.ids) - self.length

    @property
    def cross(self) -> BlockTable:
        """Blocks of the encoder's memory."""
        return self.group.cross

    @property
    def reach(self) -> int:
        """Tokens it may come to hold, which choose what depends on the length."""
        return self.group.limit

    @property
    def adapter(self) -> int:
        """Number of its adapter."""
        return self.group.adapter

    @property
    def encoded(self) -> int:
        """Tokens in the encoder's memory."""
        return self.group.encoder if self.group.encoded else 0


@dataclass(eq=False)
class SequenceGroup:
    """A request as the scheduler sees it: sequences that start, wait and leave together.

    prompt:    ids of the first sequence. limit: tokens that a sequence may come to hold. width: sequences at most.
    encoder:   tokens that an encoder reads before the sequences run; 0 without one.
    output:    what is wanted of the rows. every_row: above 0: of all tokens, not only of the last known one and of
               drafts, so many rows at most in a step.
    whole:     the prompt cannot be cut (attention to both sides).
    cached:    may use the prefix cache, below `root`, which stands for what else its keys and values depend on.
    reused:    tokens of the prompt that the prefix cache had.
    adapter:   number of the adapter that its rows have, or NO_ADAPTER.
    """

    prompt: list[int]
    limit: int
    width: int = 1
    priority: int = 0
    encoder: int = 0
    output: str = "logits"
    every_row: int = 0
    whole: bool = False
    cached: bool = True
    root: Hashable = START
    reused: int = 0
    adapter: int = NO_ADAPTER
    sequences: list[Sequence] = field(default_factory=list)
    arrival: int = -1
    running: bool = False
    encoded: bool = False
    cross: BlockTable = field(init=False)

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then first come, first served."""
        return -self.priority, self.arrival

    @property
    def swapped(self) -> bool:
        """Whether its keys and values are in the host's memory."""
        return any(sequence.swapped for sequence in self.sequences)


@dataclass(eq=False)
class ScheduledChunk:
    """Tokens of one sequence in a step: `count` from `start` on, of which the last ones are `drafts`.

    rows: which of them are wanted, counted from `start`.
    """

    sequence: Sequence
    start: int
    count: int
    rows: range
    drafts: list[int]


@dataclass
class Moves:
    """Moves of blocks of a pool. saves: (block, host block); loads: (host block, block); copies: (from, to)."""

    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class StepPlan:
    """One step. In this order: save, load and copy blocks, let the encoder read, run the chunks.

    moving: by pool, the blocks that move; saves, loads and copies are those of the first one.
    encodes: requests whose encoder text is read, with scratch blocks for each. output: of the chunks' rows.
    refused: requests that do not fit into the memory there is, with the tokens they need.
    moved:   set when saves, loads and copies are done.
    """

    moving: dict[int, Moves] = field(default_factory=dict)
    encodes: list[tuple[SequenceGroup, BlockTable]] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)
    output: str = "logits"
    refused: list[tuple[SequenceGroup, int]] = field(default_factory=list)
    moved: bool = False

    def moves(self, pool: int) -> Moves:
        """Moves of the blocks of a pool."""
        return self.moving.setdefault(pool, Moves())

    @property
    def saves(self) -> list[tuple[int, int]]:
        """(block, host block) of the first pool."""
        return self.moves(0).saves

    @property
    def loads(self) -> list[tuple[int, int]]:
        """(host block, block) of the first pool."""
        return self.moves(0).loads

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(from, to) of the first pool."""
        return self.moves(0).copies

    @property
    def tokens(self) -> int:
        """Tokens that run, the encoder's included."""
        return sum(chunk.count for chunk in self.chunks) + sum(group.encoder for group, _ in self.encodes)

    @property
    def wanted(self) -> str | None:
        """The output that is wanted of any row."""
        return self.output if any(chunk.rows for chunk in self.chunks) else None

    @property
    def groups(self) -> set[SequenceGroup]:
        """Requests that take part."""
        return {chunk.sequence.group for chunk in self.chunks} | {group for group, _ in self.encodes}

    def release(self) -> None:
        """Give back the scratch blocks of encoders."""
        for _, scratch in self.encodes:
            scratch.release()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.encodes or self.refused)
