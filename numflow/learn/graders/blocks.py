"""Grader of a student's functions as methods of block tables: single calls, then random schedules.

In a schedule sequences are written, forked, truncated and ended, and every token must be found again.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.learn.cases.verdict import Functions, Verdict, Wrong, raised, right, wrong

SIZE, BLOCKS, SCHEDULES = 4, 64, 300

# Scripts of single calls by name: ("extend", table, tokens), ("fork", table, count), ("own", table, position),
# ("truncate", table, tokens), ("end", table). Tables are numbered; a fork makes the next table.
SINGLE: dict[str, list[tuple]] = {
    "extend-one-token": [("extend", 0, 1)], "extend-full-blocks": [("extend", 0, 8)],
    "extend-some-more": [("extend", 0, 5), ("extend", 0, 8), ("extend", 0, 9), ("extend", 0, 3)],
    "truncate": [("extend", 0, 11), ("truncate", 0, 5), ("truncate", 0, 4), ("truncate", 0, 9), ("extend", 0, 6)],
    "truncate-to-nothing": [("extend", 0, 7), ("truncate", 0, 0)],
    "fork-all": [("extend", 0, 11), ("fork", 0, None), ("extend", 1, 13), ("extend", 0, 14)],
    "fork-some": [("extend", 0, 11), ("fork", 0, 2), ("extend", 1, 9)],
    "own": [("extend", 0, 7), ("fork", 0, None), ("own", 1, 5)],
    "own-then-end": [("extend", 0, 7), ("fork", 0, None), ("own", 1, 1), ("end", 0), ("extend", 1, 12)],
    "truncate-what-is-shared": [("extend", 0, 11), ("fork", 0, None), ("truncate", 1, 3), ("end", 0)],
}


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade single calls against numflow's own tables, then random schedules."""
    of = len(SINGLE) + SCHEDULES
    kind = type("Table", (BlockTable,), {"__slots__": (), **{name: functions[name] for name in lab["functions"]}})
    for number, (name, script) in enumerate(SINGLE.items(), 1):
        try:
            said = _single(kind, script)
        except Exception as error:
            return raised(name, number, of, error)
        if said:
            return wrong(name, number, of, said, said)
    for seed in range(SCHEDULES):
        name, number = f"schedule {seed}", len(SINGLE) + seed + 1
        try:
            _schedule(kind, seed)
        except Wrong as error:
            return wrong(name, number, of, str(error), str(error))
        except Exception as error:
            return raised(name, number, of, error)
    return right(of)


@contextmanager
def installed(functions: Functions, lab: Mapping[str, Any], model: bool = False) -> Iterator[None]:
    """A context in which the functions are methods of the engine's tables. Tables with a window keep their own."""
    before = {name: BlockTable.__dict__[name] for name in lab["functions"]}

    def method(name):
        return lambda table, *given: (before if table.window else functions)[name](table, *given)

    for name in before:
        setattr(BlockTable, name, method(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(BlockTable, name, function)


def _single(kind: type, script: list[tuple]) -> str:
    """The message on the first wrong state after a call of a script; "" if there is none."""
    pairs = []
    for one in (kind, BlockTable):
        allocator = BlockAllocator(BLOCKS)
        pairs.append((allocator, [one(allocator, SIZE)]))
    done: list[str] = []
    for what, table, *given in script:
        results = [_do(tables, what, table, given) for _, tables in pairs]
        done.append(f"{what}({', '.join(map(str, given))})" + (f" of table {table}" if len(pairs[1][1]) > 1 else ""))
        (allocator, tables), (true_allocator, true_tables) = pairs
        if results[0] != results[1]:
            return f"after {', '.join(done)}: it returns {results[0]}, expected {results[1]}"
        for number, (found, true) in enumerate(zip(tables, true_tables, strict=True)):
            if list(found.blocks) != true.blocks:
                return f"after {', '.join(done)}: table {number} has the blocks {found.blocks}, expected {true.blocks}"
        for block in range(BLOCKS):
            has, should = allocator.holders(block), true_allocator.holders(block)
            if has != should:
                return f"after {', '.join(done)}: block {block} has {_holders(has)}, expected {should}"
    return ""


def _do(tables: list, what: str, table: int, given: list) -> Any:
    if what == "end":
        tables[table].release()
        return None
    result = getattr(tables[table], what)(*given)
    if what != "fork":
        return result
    if not isinstance(result, BlockTable):
        raise Wrong(f"fork should return a table, but returns {type(result).__name__}")
    tables.append(result)
    return None


def _schedule(kind: type, seed: int) -> None:
    """Run random operations on sequences: append tokens (with copy on write), fork, truncate, end.

    Raises:
        Wrong: a token is lost, or the holders of a block do not agree with the tables.
    """
    rng, allocator = random.Random(seed), BlockAllocator(256)
    memory: dict[int, list] = {}
    texts: list[list[int]] = [[]]
    tables = [kind(allocator, SIZE)]
    for step in range(30):
        number = rng.randrange(len(tables))
        operation = rng.choice(("write", "write", "fork", "truncate", "end"))
        if operation == "write":
            _write(tables[number], texts[number], [rng.randrange(1000) for _ in range(rng.randint(1, 7))], memory)
        elif operation == "fork" and len(tables) < 5:
            count = rng.choice((None, rng.randint(0, len(tables[number].blocks))))
            tables.append(tables[number].fork(count))
            texts.append(texts[number][:None if count is None else count * SIZE])
        elif operation == "truncate":
            texts[number] = texts[number][:rng.randint(0, len(texts[number]))]
            tables[number].truncate(len(texts[number]))
        elif operation == "end" and len(tables) > 1:
            tables.pop(number).release()
            texts.pop(number)
        _agree(step, allocator, tables, texts, memory)


def _write(table, text: list[int], tokens: list[int], memory: dict) -> None:
    table.extend(len(text) + len(tokens))
    for token in tokens:
        position = len(text)
        if table.shared(position):
            old, new = table.own(position)
            memory[new] = list(memory.get(old, [None] * SIZE))
        memory.setdefault(table.blocks[position // SIZE], [None] * SIZE)[position % SIZE] = token
        text.append(token)


def _agree(step: int, allocator: BlockAllocator, tables: list, texts: list, memory: dict) -> None:
    uses = Counter(block for table in tables for block in table.blocks)
    for block in sorted({*uses, *range(allocator.capacity)}):
        if allocator.holders(block) != uses[block]:
            raise Wrong(f"step {step}: block {block} has {_holders(allocator.holders(block))}, but is in the tables "
                        f"{uses[block]} times")
    for number, (table, text) in enumerate(zip(tables, texts, strict=True)):
        if len(table.blocks) != -(-len(text) // SIZE):
            raise Wrong(f"step {step}: table {number} has {len(table.blocks)} blocks for {len(text)} tokens")
        for position, token in enumerate(text):
            if (found := memory[table.blocks[position // SIZE]][position % SIZE]) != token:
                raise Wrong(f"step {step}: sequence {number} finds token {found} at position {position}, "
                            f"where it wrote {token}")


def _holders(count: int) -> str:
    return f"{count} holder{'s' * (count != 1)}"
