"""Memory plan of a model: bytes of weights, and the limit of the KV memory in blocks.

KV memory grows with the texts. Without an explicit limit the growth stops before the machine runs short of memory: a
machine that swaps or kills processes cannot serve requests.
"""

from dataclasses import dataclass

from numflow.errors import OutOfMemoryError, RequestError
from numflow.machine import free_memory, whole_memory
from numflow.network.windows import STATE
from numflow.sizes import in_words

CACHE_BYTES = 1 << 30  # KV memory grows up to this size before cached blocks are evicted, without an explicit limit
LEAST_LEFT = 256 << 20  # memory left to other processes: at least these bytes, and 1 / PART_LEFT of all memory
PART_LEFT = 10
FLOOR_BYTES = 128 << 20  # KV memory that a model may always have


def block_bytes(program) -> int:
    """Bytes of one KV block of a program, including a block for cross-attention, if any; without keys and values, bytes
    of a slot for states."""
    return program.block_bytes + program.cross_block_bytes or program.window_bytes.get(STATE, 0)


def blocks_within(size: int, program, memory: "MemoryPlan | None" = None) -> int:
    """Number of KV blocks that fit into `size` bytes. memory: plan of the machine.

    Raises:
        RequestError: not even one block fits, or `size` is more than the machine's memory.
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
    """Memory of a model on its machine.

    weights: bytes of weights. free: free bytes beside the weights when the plan was made; None: unknown, or the memory
    is on other machines or GPUs: KV memory then grows until allocation fails. left: bytes of `free` left to other
    processes.
    given: explicit limit of the KV memory in bytes.
    block, tokens: bytes and tokens of a KV block.
    windows: maximum bytes of a text in layers with a window. states: bytes of a text in recurrent layers. growing:
    bytes of a block in all other layers.
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
        """Limit of the KV memory in bytes; None: no limit is known."""
        if self.given is not None:
            return self.given
        return None if self.free is None else max(self.free - self.left, FLOOR_BYTES)

    @property
    def blocks(self) -> int | None:
        """Limit of the KV memory in blocks."""
        return None if self.most is None or not self.block else max(1, self.most // self.block)

    def check(self, blocks: int, more: int) -> None:
        """Check that the machine's free memory allows `more` KV blocks besides the present `blocks`.

        Raises:
            OutOfMemoryError: too little memory would be left.
        """
        if self.free is None or self.given is not None or (blocks + more) * self.block <= FLOOR_BYTES:
            return
        free = free_memory()
        if free is not None and more * self.block > free - self.left:
            raise OutOfMemoryError(f"no memory for {in_words(more * self.block)} more of keys and values: "
                                   f"{in_words(max(0, free))} are free, of which {in_words(self.left)} are left to "
                                   "others")

    def __str__(self) -> str:
        """Summary in one line."""
        line = f"weights {in_words(self.weights)}"
        if not self.block:
            return line
        count, each = self._capacity()
        if self.most is None:
            return f"{line}; keys and values as needed, {each}"
        size = f"up to {in_words(self.most)}" if self.given is None else f"{in_words(self.most)} as asked for"
        line = f"{line}; keys and values {size} ({count}, {each})"
        if self.free is None:
            return line
        if self.given is not None:
            return f"{line}; {in_words(self.free)} are free" + ("" if self.given <= self.free else ", which is less")
        return f"{line}; {in_words(self.free)} are free, of which {in_words(self.left)} are left to others"

    def _capacity(self) -> tuple[str, str]:
        """Capacity in tokens, and memory per token, as text."""
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
    """Memory plan of a program that was just loaded. before: free bytes before loading; None: the program is not on
    this machine. runner: runner with the program's pools, if layers have windows."""
    now, whole = free_memory(), whole_memory()
    free = None if before is None or now is None else max(0, min(now, before - int(program.weights_bytes)))
    left = max(LEAST_LEFT, (whole or 0) // PART_LEFT)
    all_pools = [] if runner is None else runner.pools
    pools = [pool for pool in all_pools if pool.window > 0]
    windows = sum(pool.size * pool.max_blocks(runner.context, runner.chunk, program.block_size) for pool in pools)
    growing = program.block_bytes + program.cross_block_bytes - sum(pool.size for pool in pools)
    return MemoryPlan(int(program.weights_bytes), block_bytes(program), program.block_size, free, left,
                      windows=windows, growing=growing,
                      states=sum(pool.size for pool in all_pools if pool.window == STATE))
