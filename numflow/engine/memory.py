"""How much memory keys and values may take, in blocks."""

from numflow.errors import RequestError

CACHE_BYTES = 1 << 30  # memory that grows for the prefix cache's sake, where no budget is given


def block_bytes(program) -> int:
    """Bytes of one KV block of a program, with a block of encoder memory where it has any."""
    return program.block_bytes + getattr(program, "cross_block_bytes", 0)


def blocks_within(size: int, program) -> int:
    """KV blocks that fit into so many bytes.

    Raises:
        RequestError: not even one.
    """
    if size < block_bytes(program):
        raise RequestError(f"{size} bytes for keys and values hold no block of {program.block_size} tokens, which "
                           f"takes {block_bytes(program)} bytes")
    return size // block_bytes(program)
