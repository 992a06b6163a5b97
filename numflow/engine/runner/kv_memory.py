"""The memory plan of a model: what weights take, and how much keys and values may, in blocks.

Keys and values grow as texts do. Without a budget of one's own they stop where the machine would be left with too
little: a machine that swaps, or ends processes, serves nobody.
"""

from dataclasses import dataclass

from numflow.errors import OutOfMemoryError, RequestError
from numflow.machine import free_memory, whole_memory
from numflow.network.windows import STATE
from numflow.sizes import in_words

CACHE_BYTES = 1 << 30  # memory that grows for the prefix cache's sake, where no budget is given
LEAST_LEFT = 256 << 20  # bytes, and of all memory this part, that are left to others
PART_LEFT = 10
FLOOR_BYTES = 128 << 20  # of keys and values, that a model may have in any case


def block_bytes(program) -> int:
    """Bytes of one KV block of a program, with a block of encoder memory where it has any; of a slot for states where
    there are no keys and values."""
    return program.block_bytes + program.cross_block_bytes or program.window_bytes.get(STATE, 0)


def blocks_within(size: int, program, memory: "MemoryPlan | None" = None) -> int:
    """KV blocks that fit into so many bytes. memory: of the machine that they are on.

    Raises:
        RequestError: not even one, or more bytes than this machine has.
    """
    if size < block_bytes(program):
        raise RequestError(f"{size} bytes for keys and values hold no block of {program.block_size} tokens, which "
                           f"takes {block_bytes(program)} bytes")
    whole = whole_memory() if memory is not None and memory.free is not None else None
    if whole is not None and size > whole:
        raise OutOfMemoryError(f"kv_memory: {in_words(size)} for keys and values is more than the {in_words(whole)} "
                               "that this process can have")
    return size // max(1, block_bytes(program))


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a model takes of the machine it runs on.

    weights: bytes. free: bytes that there were beside them when the plan was made; None: nobody knows, or they are on
    other machines or on GPUs, and keys and values grow until there is no more. left: bytes of these that are left to
    others. given: bytes for keys and values that somebody has decided on.
    block, tokens: bytes and tokens of a KV block.
    windows: bytes that a text takes for layers that see a window of it, at most; states: for what recurrent steps keep
    of it; growing: bytes of a block, of the other layers.
    """

    weights: int
    block: int
    tokens: int
    free: int | None = None
    left: int = 0
    given: int | None = None
    windows: int = 0
    growing: int = 0
    states: int = 0

    @property
    def most(self) -> int | None:
        """Bytes that keys and values may take; None: no limit is known."""
        if self.given is not None:
            return self.given
        return None if self.free is None else max(self.free - self.left, FLOOR_BYTES)

    @property
    def blocks(self) -> int | None:
        """KV blocks that there may be."""
        return None if self.most is None or not self.block else max(1, self.most // self.block)

    def check(self, blocks: int, more: int) -> None:
        """Refuse `more` KV blocks beside the present `blocks` if the machine's free memory does not allow them now.

        Raises:
            OutOfMemoryError: too little would be left.
        """
        if self.free is None or self.given is not None or (blocks + more) * self.block <= FLOOR_BYTES:
            return
        free = free_memory()
        if free is not None and more * self.block > free - self.left:
            raise OutOfMemoryError(f"no memory for {in_words(more * self.block)} more of keys and values: "
                                   f"{in_words(max(0, free))} are free, of which {in_words(self.left)} are left to "
                                   "others")

    def __str__(self) -> str:
        """One line for people."""
        line = f"weights {in_words(self.weights)}"
        if not self.block:
            return line
        count, each = self._room()
        if self.most is None:
            return f"{line}; keys and values as needed, {each}"
        size = f"up to {in_words(self.most)}" if self.given is None else f"{in_words(self.most)} as asked for"
        line = f"{line}; keys and values {size} ({count}, {each})"
        if self.free is None:
            return line
        if self.given is not None:
            return f"{line}; {in_words(self.free)} are free" + ("" if self.given <= self.free else ", which is less")
        return f"{line}; {in_words(self.free)} are free, of which {in_words(self.left)} are left to others"

    def _room(self) -> tuple[str, str]:
        """Capacity in tokens and memory of a token, in words."""
        most, fixed = self.most or 0, self.windows + self.states
        if not fixed:
            return f"{most // self.block * self.tokens:,} tokens", f"{in_words(self.block / self.tokens)} a token"
        if not self.growing:
            return f"{most // fixed:,} texts of any length", f"{in_words(fixed)} each"
        count = max(0, most - fixed) // self.growing * self.tokens or most // self.block * self.tokens
        beside = " and ".join(f"{in_words(size)} of {what}" for what, size in
                              (("windows", self.windows), ("states", self.states)) if size)
        return f"{count:,} tokens of one text", f"{in_words(self.growing / self.tokens)} a token beside {beside}"


def plan_memory(program, before: int | None, runner=None) -> MemoryPlan:
    """The plan of a program that has just been loaded. before: free bytes before that; None: not of this machine.
    runner: has the program's pools, where layers have windows."""
    now, whole = free_memory(), whole_memory()
    free = None if before is None or now is None else max(0, min(now, before - int(program.weights_bytes)))
    left = max(LEAST_LEFT, (whole or 0) // PART_LEFT)
    every = [] if runner is None else runner.pools
    pools = [pool for pool in every if pool.window > 0]
    windows = sum(pool.size * pool.most(runner.context, runner.chunk, program.block_size) for pool in pools)
    growing = program.block_bytes + program.cross_block_bytes - sum(pool.size for pool in pools)
    return MemoryPlan(int(program.weights_bytes), block_bytes(program), program.block_size, free, left,
                      windows=windows, growing=growing, states=sum(pool.size for pool in every if pool.window == STATE))
