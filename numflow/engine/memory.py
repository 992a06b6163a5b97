"""How much memory keys and values may take: sizes as people write them, and what they are in blocks."""

import re

from numflow.errors import RequestError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
         "ti": 1 << 40}
CACHE_BYTES = 1 << 30  # memory that grows for the prefix cache's sake, where no budget is given


def parse_bytes(size: int | str) -> int:
    """A number of bytes, or text such as "2GB", "512MiB", "1.5g".

    Raises:
        RequestError: anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", size.lower()) if isinstance(size, str) else None
    if match is None or not (count := int(float(match[1]) * UNITS[match[2]])):
        raise RequestError(f'memory for keys and values should be a size such as "2GB" or "512MiB", is {size!r}')
    return count


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
