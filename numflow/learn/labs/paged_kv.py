"""Lab 5: paged keys and values.

The keys and values of a sequence are stored in blocks of `block_size` tokens, anywhere in memory, like the pages of a
process (PagedAttention). A block table lists the ids of a sequence's blocks in the order of its tokens: the token at
position p is in block table.blocks[p // block_size]. Two sequences that begin with the same text share blocks. An
allocator counts the holders of each block (its reference count). A block with more than one holder must not be written:
a sequence that has to write takes a copy of the block first (copy on write).

    table.blocks                         list of block ids, int
    table.block_size                     tokens per block
    table.allocator.allocate(count)      list of `count` new blocks; this table is their only holder
    table.allocator.share(blocks)        list of the same blocks, each with one more holder
    table.allocator.release(blocks)      one holder less for each; a block without holders is free
    table.allocator.holders(block)       number of holders
    type(table)(table.allocator, table.block_size)      an empty table

Write the four functions, which the scheduler calls as methods of a table. Each changes table.blocks, and allocates or
releases exactly the necessary blocks: one too many wastes memory, one too few overwrites another sequence's text. `own`
is called for shared blocks only. Its caller copies the content from the old block to the new block.

    numflow learn check 5        numflow learn hint 5        numflow learn bench 5
"""

LAB = {
    "number": 5, "title": "Paged keys and values", "minutes": 60, "functions": ["extend", "fork", "own", "truncate"],
    "grader": "blocks", "needs": [3],
    "hints": [
        "Draw two tables with 9 tokens each that share their first two blocks of 4 tokens. Which blocks belong to one "
        "table only? How many holders has each block?",
        "extend and truncate need the number of blocks for `tokens` tokens, rounded up: -(-tokens // block_size). In "
        "fork, a copy of the list does not count new holders: use share().",
        "own: index = position // block_size; old = blocks[index]; (new,) = allocate(1); release([old]); blocks[index] "
        "= new; return old, new. The caller copies the content from old to new."],
}


def extend(table, tokens):
    """Allocate blocks until the table has enough for `tokens` tokens. Existing blocks stay."""
    missing = -(-tokens // table.block_size) - len(table.blocks)
    if missing > 0:
        table.blocks += table.allocator.allocate(missing)


def fork(table, count=None):
    """Return a new table that shares the first `count` blocks; None: all blocks."""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.allocator.share(table.blocks[:count])
    return twin


def own(table, position):
    """Replace the shared block of a position by a new block of this table; return (old block, new block)."""
    index = position // table.block_size
    old, (new,) = table.blocks[index], table.allocator.allocate(1)
    table.allocator.release([old])
    table.blocks[index] = new
    return old, new


def truncate(table, tokens):
    """Release the blocks that are not needed for the first `tokens` tokens."""
    needed = -(-tokens // table.block_size)
    if needed < len(table.blocks):
        table.allocator.release(table.blocks[needed:])
        del table.blocks[needed:]


def extend__rounded_down(table, tokens):
    """a number of blocks that is rounded down: the last tokens have no block"""
    extend(table, tokens // table.block_size * table.block_size)


def extend__one_more(table, tokens):
    """tokens // block_size + 1 blocks: one too many if the tokens fill their blocks exactly"""
    extend(table, (tokens // table.block_size + 1) * table.block_size)


def extend__again(table, tokens):
    """new blocks for all tokens: subtract the blocks that the table has already"""
    table.blocks += table.allocator.allocate(-(-tokens // table.block_size))


def extend__forgets(table, tokens):
    """new blocks that replace the existing blocks"""
    if len(table.blocks) * table.block_size < tokens:
        table.blocks = table.allocator.allocate(-(-tokens // table.block_size))


def fork__uncounted(table, count=None):
    """blocks in two tables with only one holder: share() counts the second holder"""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.blocks[:count]
    return twin


def fork__one_list(table, count=None):
    """one list object for two tables: a block that one table appends is in the other too"""
    twin = fork(table, count)
    if count is None:
        twin.blocks = table.blocks
    return twin


def fork__all(table, count=None):
    """a fork that shares all blocks although `count` is smaller"""
    return fork(table)


def fork__fresh(table, count=None):
    """new blocks instead of shared ones: nobody copies the content to them"""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.allocator.allocate(len(table.blocks[:count]))
    return twin


def own__kept(table, position):
    """an old block that is not released: its holder count stays too high"""
    index = position // table.block_size
    old, (new,) = table.blocks[index], table.allocator.allocate(1)
    table.blocks[index] = new
    return old, new


def own__not_stored(table, position):
    """a new block that is not stored in table.blocks"""
    index = position // table.block_size
    old, (new,) = table.blocks[index], table.allocator.allocate(1)
    table.allocator.release([old])
    return old, new


def own__swapped(table, position):
    """a result (new block, old block): the caller would copy the content in the wrong direction"""
    return own(table, position)[::-1]


def own__by_position(table, position):
    """a position that is used as an index of table.blocks: divide it by block_size"""
    return own(table, position * table.block_size)


def truncate__rounded_down(table, tokens):
    """a number of blocks that is rounded down: the last remaining tokens lose their block"""
    truncate(table, tokens // table.block_size * table.block_size)


def truncate__not_released(table, tokens):
    """blocks that are removed from table.blocks but not released"""
    del table.blocks[-(-tokens // table.block_size):]


def truncate__still_listed(table, tokens):
    """blocks that are released but still in table.blocks"""
    needed = -(-tokens // table.block_size)
    if needed < len(table.blocks):
        table.allocator.release(table.blocks[needed:])


def extend__shrinks(table, tokens):
    """blocks that `extend` releases: extend keeps all existing blocks, only truncate releases"""
    truncate(table, tokens)
    extend(table, tokens)


def fork__none_is_all(table, count=None):
    """a count of 0 that is treated like None: `if count` is false for both"""
    return fork(table, count or None)


def truncate__one(table, tokens):
    """one released block where several are not needed"""
    if len(table.blocks) > -(-tokens // table.block_size):
        table.allocator.release([table.blocks.pop()])


def extend__tokens(table, tokens):
    """one block per token: a block has block_size tokens"""
    table.blocks += table.allocator.allocate(max(tokens - len(table.blocks), 0))


def fork__last(table, count=None):
    """the last `count` blocks: two texts share their first blocks"""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.allocator.share(table.blocks[len(table.blocks) - count:] if count is not None else table.blocks)
    return twin


def bench(functions):
    """Number of blocks of eight answers of 30 tokens to one prompt of 405 tokens."""
    from numflow.engine.schedule.blocks import BlockAllocator, BlockTable

    kind = type("Table", (BlockTable,), {"__slots__": (), **functions})
    allocator = BlockAllocator(1000)
    table = kind(allocator, 16)
    table.extend(405)
    for answer in [table.fork() for _ in range(8)]:
        if answer.shared(404):
            answer.own(404)
        answer.extend(435)
    alone = -(-405 // 16) + 8 * -(-435 // 16)
    return {"what": "blocks of a prompt of 405 tokens and eight answers of 30", "unit": "blocks",
            "bars": [("yours", allocator.used), ("without sharing", alone)]}
