"""Sequences, sequence groups, and the plan of one step. Integers only."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from numflow.engine.schedule.blocks import BlockTable
from numflow.engine.schedule.prefix import START, AdapterStart
from numflow.network.windows import STATE

NO_ADAPTER = -1  # as in Batch.adapters


class Sequence:
    """One sequence of tokens.

    ids:    prompt and generated tokens. length: number of tokens with keys and values in the blocks of `tables`.
    tables: block tables, one for each pool.
    drafts: draft tokens after `ids`; cleared when they have run. drafts_run: number of drafts in the last step.
    node, cached_blocks: the prefix cache has the first `cached_blocks` blocks; `node` is the node of the last of them.
    shared_blocks: leading blocks whose tokens another text in the prefix cache has too.
    """

    __slots__ = ("cached_blocks", "drafts", "drafts_run", "group", "ids", "length", "node", "shared_blocks", "tables")

    def __init__(self, group: "SequenceGroup", ids: list[int], *tables: BlockTable):
        self.group, self.ids, self.tables, self.length = group, ids, tables, 0
        self.drafts: list[int] = []
        self.node, self.cached_blocks, self.shared_blocks = group.root, 0, 0
        self.drafts_run = 0

    @property
    def table(self) -> BlockTable:
        """Block table of the first pool."""
        return self.tables[0]

    @property
    def swapped(self) -> list[int]:
        """Host blocks with the keys and values of the first pool while the sequence is swapped out."""
        return self.table.swapped

    @property
    def spare_tokens(self) -> int:
        """Number of tokens after `length` that the allocated blocks can hold."""
        return min(table.capacity for table in self.tables) - self.length

    def tokens_needed(self, table: BlockTable, chunk: int) -> int:
        """Number of tokens that a table must hold now, if up to `chunk` tokens of a prompt run in a step. Blocks inside
        a window are allocated step by step, since older blocks are released meanwhile."""
        total = len(self.ids) + len(self.drafts)
        return min(total, self.length + max(chunk, 1 + len(self.drafts))) if table.window else total

    @property
    def recurrent(self) -> bool:
        """Whether the sequence has a recurrent state. Rejected drafts cannot be removed from a state."""
        return self.tables[-1].window == STATE

    def is_reusable(self, length: int) -> bool:
        """Whether a snapshot of the state after `length` tokens may be reused: other prompts may begin with this
        prompt. Snapshots of generated text are evicted first."""
        return length <= len(self.group.prompt)

    @property
    def pending(self) -> int:
        """Number of tokens of `ids` that have not run."""
        return len(self.ids) - self.length

    @property
    def cross(self) -> BlockTable:
        """Block table of the encoder's output (cross-attention keys and values)."""
        return self.group.cross

    @property
    def reach(self) -> int:
        """Maximum length of the sequence; selects the rotary frequencies that depend on the length."""
        return self.group.limit

    @property
    def adapter(self) -> int:
        """Index of the adapter."""
        return self.group.adapter

    @property
    def adapter_start(self) -> int:
        """Position of the first token on which the adapter has an effect."""
        return self.group.adapter_start.position if self.group.adapter_start else 0

    @property
    def encoded(self) -> int:
        """Number of tokens that the encoder has read."""
        return self.group.encoder if self.group.encoded else 0


@dataclass(eq=False)
class SequenceGroup:
    """A request as the scheduler sees it: sequences that start, wait and end together.

    prompt:    ids of the first sequence. limit: maximum tokens of a sequence. width: maximum number of sequences.
    encoder:   tokens that an encoder reads before the sequences run; 0 without an encoder.
    output:    name of the output that is read. every_row: if above 0, the output of all tokens is read, at most
               `every_row` rows in a step; else only of the last token and of drafts.
    whole:     the prompt cannot be split into chunks (bidirectional attention).
    cached:    whether the request uses the prefix cache. root: root node of its texts in the prefix cache: stands for
               everything but the tokens that keys and values depend on.
    reused:    tokens of the prompt found in the prefix cache.
    adapter:   index of the adapter of its rows, or NO_ADAPTER. adapter_start: start of an adapter that has no effect on
               the first tokens; None: it has an effect on all.
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
    adapter_start: AdapterStart | None = None
    sequences: list[Sequence] = field(default_factory=list)
    arrival: int = -1
    running: bool = False
    encoded: bool = False
    cross: BlockTable = field(init=False)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of scheduling: higher priority first, then first come, first served."""
        return -self.priority, self.arrival

    @property
    def swapped(self) -> bool:
        """Whether keys and values of the group are swapped out to host memory."""
        return any(sequence.swapped for sequence in self.sequences)


@dataclass(eq=False)
class ScheduledChunk:
    """Tokens of one sequence in a step: `count` tokens from position `start` on; the last of them are `drafts`.

    rows: tokens whose output is read, counted from `start`.
    """

    sequence: Sequence
    start: int
    count: int
    rows: range
    drafts: list[int]


@dataclass
class Moves:
    """Block moves of one pool. saves: (block, host block); loads: (host block, block); copies: (source, target)."""

    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class StepPlan:
    """Plan of one step. Order of execution: save, load and copy blocks; run the encoder; run the chunks.

    moving:  block moves by pool; `saves`, `loads` and `copies` are the moves of the first pool.
    encodes: requests whose encoder runs, with scratch blocks for each. output: name of the output of the chunks' rows.
    refused: requests that do not fit into the memory, with the number of tokens that they need.
    moved:   set when saves, loads and copies are done.
    """

    moving: dict[int, Moves] = field(default_factory=dict)
    encodes: list[tuple[SequenceGroup, BlockTable]] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)
    output: str = "logits"
    refused: list[tuple[SequenceGroup, int]] = field(default_factory=list)
    moved: bool = False

    def moves(self, pool: int) -> Moves:
        """Block moves of a pool."""
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
        """(source, target) of the first pool."""
        return self.moves(0).copies

    @property
    def tokens(self) -> int:
        """Number of tokens that run, including those of encoders."""
        return sum(chunk.count for chunk in self.chunks) + sum(group.encoder for group, _ in self.encodes)

    @property
    def wanted(self) -> str | None:
        """Name of the output that is read, None if no row is read."""
        return self.output if any(chunk.rows for chunk in self.chunks) else None

    @property
    def groups(self) -> set[SequenceGroup]:
        """Requests of the step."""
        return {chunk.sequence.group for chunk in self.chunks} | {group for group, _ in self.encodes}

    def release(self) -> None:
        """Release the scratch blocks of encoders."""
        for _, scratch in self.encodes:
            scratch.release()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.encodes or self.refused)
