"""Lab 5: paged keys and values.

The keys and values of a sequence lie in blocks of `block_size` tokens anywhere in memory, as the pages of a process do
(PagedAttention). A table has the numbers of a sequence's blocks in the order of its tokens; the token at position p
is in block table.blocks[p // block_size]. Two sequences that begin with the same text share blocks: an allocator
counts the holders of each block, and a block with more than one holder must not be written. Who wants to write there
takes a copy for itself first: copy on write.

    table.blocks                         list of int
    table.block_size                     tokens of a block
    table.allocator.allocate(count)      that many new blocks, a list; this table is their only holder
    table.allocator.share(blocks)        the same blocks, each with one holder more
    table.allocator.release(blocks)      one holder less; a block without holders is free
    table.allocator.holders(block)       how many there are
    type(table)(table.allocator, table.block_size)      an empty table

Write the four functions, which the scheduler calls as methods of a table. Each changes table.blocks and takes or
gives back just the blocks that it has to: a block too many is memory lost, one too few is somebody else's text.
`own` is called for shared blocks alone, and whoever calls it copies the content from the old block to the new one.

    numflow learn check 5        numflow learn hint 5        numflow learn bench 5
"""

LAB = {
    "number": 5, "title": "Paged keys and values", "minutes": 60, "functions": ["extend", "fork", "own", "truncate"],
    "grader": "blocks", "needs": [3],
    "hints": [
        "Draw two tables that share their first two blocks of 4 tokens, each with 9 tokens. Which block does each have "
        "for itself? How many holders has each block?",
        "extend and truncate need the number of blocks that so many tokens fill, rounded up: -(-tokens // block_size). "
        "fork is hard because a list that is copied has no new holders: share them.",
        "own: old = blocks[at]; (new,) = allocate(1); release([old]); blocks[at] = new; return old, new. Who calls it "
        "copies the content from old to new."],
}


def extend(table, tokens):
    """Hold enough blocks for `tokens` tokens; blocks that are there already stay."""
    missing = -(-tokens // table.block_size) - len(table.blocks)
    if missing > 0:
        table.blocks += table.allocator.allocate(missing)


def fork(table, count=None):
    """A new table that shares the first `count` blocks, None: all."""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.allocator.share(table.blocks[:count])
    return twin


def own(table, position):
    """Take a block of its own in place of the shared one at a position: (old block, new block)."""
    at = position // table.block_size
    old, (new,) = table.blocks[at], table.allocator.allocate(1)
    table.allocator.release([old])
    table.blocks[at] = new
    return old, new


def truncate(table, tokens):
    """Give back the blocks beyond the first `tokens` tokens."""
    needed = -(-tokens // table.block_size)
    if needed < len(table.blocks):
        table.allocator.release(table.blocks[needed:])
        del table.blocks[needed:]


def extend__rounded_down(table, tokens):
    """a number of blocks that is rounded down: the last tokens have none"""
    extend(table, tokens // table.block_size * table.block_size)


def extend__one_more(table, tokens):
    """tokens // block_size + 1 blocks: one too many where the tokens just fill their blocks"""
    extend(table, (tokens // table.block_size + 1) * table.block_size)


def extend__again(table, tokens):
    """blocks for all the tokens beside those that are there already"""
    table.blocks += table.allocator.allocate(-(-tokens // table.block_size))


def extend__forgets(table, tokens):
    """new blocks in place of those that were there"""
    if len(table.blocks) * table.block_size < tokens:
        table.blocks = table.allocator.allocate(-(-tokens // table.block_size))


def fork__uncounted(table, count=None):
    """blocks that two tables name and one holds: share() counts the second holder"""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.blocks[:count]
    return twin


def fork__one_list(table, count=None):
    """one list of blocks for two tables: what one appends the other has too"""
    twin = fork(table, count)
    if count is None:
        twin.blocks = table.blocks
    return twin


def fork__all(table, count=None):
    """a fork that shares all blocks though `count` says fewer"""
    return fork(table)


def fork__fresh(table, count=None):
    """new blocks in place of shared ones: nothing has been copied to them"""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.allocator.allocate(len(table.blocks[:count]))
    return twin


def own__kept(table, position):
    """an old block that is not given back: it keeps a holder that no table names"""
    at = position // table.block_size
    old, (new,) = table.blocks[at], table.allocator.allocate(1)
    table.blocks[at] = new
    return old, new


def own__not_named(table, position):
    """a new block that the table does not name"""
    at = position // table.block_size
    old, (new,) = table.blocks[at], table.allocator.allocate(1)
    table.allocator.release([old])
    return old, new


def own__turned(table, position):
    """(new block, old block): the content would be copied the wrong way"""
    return own(table, position)[::-1]


def own__by_position(table, position):
    """a position that is taken for the number of a block"""
    return own(table, position * table.block_size)


def truncate__rounded_down(table, tokens):
    """a number of blocks that is rounded down: the last tokens that stay have lost theirs"""
    truncate(table, tokens // table.block_size * table.block_size)


def truncate__not_released(table, tokens):
    """blocks that the table does not name any more and still holds"""
    del table.blocks[-(-tokens // table.block_size):]


def truncate__still_named(table, tokens):
    """blocks that were given back and that the table still names"""
    needed = -(-tokens // table.block_size)
    if needed < len(table.blocks):
        table.allocator.release(table.blocks[needed:])


def extend__shrinks(table, tokens):
    """blocks that `extend` gives back: those that are there already stay, and truncate is for the others"""
    truncate(table, tokens)
    extend(table, tokens)


def fork__none_is_all(table, count=None):
    """a count of 0 that is taken for None: `if count` is false for both"""
    return fork(table, count or None)


def truncate__one(table, tokens):
    """one block that is given back where several are beyond the tokens"""
    if len(table.blocks) > -(-tokens // table.block_size):
        table.allocator.release([table.blocks.pop()])


def extend__tokens(table, tokens):
    """as many blocks as there are tokens: a block has block_size of them"""
    table.blocks += table.allocator.allocate(max(tokens - len(table.blocks), 0))


def fork__last(table, count=None):
    """the last `count` blocks: the first ones are what two texts share"""
    twin = type(table)(table.allocator, table.block_size)
    twin.blocks = table.allocator.share(table.blocks[len(table.blocks) - count:] if count is not None else table.blocks)
    return twin


def bench(functions):
    """Blocks of eight answers to one prompt of 400 tokens, 30 tokens each."""
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
