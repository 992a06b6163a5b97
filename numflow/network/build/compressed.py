"""Attention over the last tokens and, beside them, over entries that each stand for a window of tokens.

A token's key is its value too, one for all heads. As it turned with its position, what a head has found is turned back
by the query's. An entry is a mean of what the tokens of its window have for it, column by column, by weights that they
have as well; it may take from the window before too, of which other columns count then. An index may choose entries.
"""

from numflow.errors import SpecError
from numflow.network.build.attention import MOST_INDEXED, placed, position_biases
from numflow.network.build.builder import Builder
from numflow.network.build.projections import Heads
from numflow.network.build.rope import rotate
from numflow.ops import Cache, View


def compressed_attention(b: Builder, x: View) -> View:
    """x [T, D] -> [T, D]."""
    shape = Heads(*(b.option("attention", key) for key in ("heads", "kv_heads", "head_dim", "value_dim")))
    heads, size = shape.heads, shape.head_dim
    _check(b, shape)
    low, query = x, "attn_q"
    if rank := b.option("latent", "q_rank"):
        low, query = b.linear("attn_q_a", x, b.view("q_low", rank)), "attn_q_b"
        b.norm("attn_q_a_norm", low, low, eps=b.option("latent", "norm_eps"))
    q, k = b.linear(query, low, b.view("q", heads * size)), b.linear("attn_k", x, b.view("kv", size))
    placed(b, [("q", q, heads), ("k", k, 1)], shape)
    name, rules = f"{b.prefix}self", {key: b.option("attention", key) for key in ("scale", "window", "softcap")}
    b.caches[name] = Cache(name, 1, size, 0, prefix=size)
    b.emit("cache_write", (k,), (), "cache_write", cache=name)
    chosen: tuple[View, ...] = ()
    if b.option("compressed", "every"):
        rules["entries"] = _entries(b, x, "pool", size)
        if b.option("indexer", "heads"):
            chosen = (_index(b, x, low),)
    y = b.view("attention", heads * size)
    b.emit("attention", (q, *chosen), (y,), "attention", position_biases(b, heads), cache=name, heads=heads,
           causal=True, **rules)
    if b.option("rope", "enabled"):
        rotate(b, y, heads, size, "rope_back", back=True)
    if groups := b.option("compressed", "out_groups"):
        if heads % groups:
            raise SpecError(f"{b.where}: compressed.out_groups: expected a divisor of attention.heads {heads}, found "
                            f"{groups}", ("compressed.out_groups", "attention.heads"))
        rank, found = b.option("compressed", "out_rank"), y
        y = b.view("attention_groups", groups * rank)
        weight = b.head_matrices("attn_output_a", groups, rank, range(rank), found.width // groups, "")
        b.emit("head_linear", (found,), (y,), "attn_output_a", {"weight": weight}, heads=groups)
    return b.linear("attn_output", y, b.view("branch", x.width))


def _check(b: Builder, shape: Heads) -> None:
    """That nothing is asked for which this attention does not have.

    Raises:
        SpecError: naming the option and what was expected.
    """
    for key, found, wanted in (("kv_heads", shape.kv_heads, 1), ("value_dim", shape.value_dim, shape.head_dim),
                               ("causal", b.option("attention", "causal"), True),
                               ("alibi", b.option("attention", "alibi"), False),
                               ("buckets", b.option("attention", "buckets"), 0),
                               ("chunk", b.option("attention", "chunk"), 0)):
        if found != wanted:
            raise SpecError(f"{b.where}: attention.{key}: expected {wanted!r} with mixer.kind 'compressed', found "
                            f"{found!r}", (f"attention.{key}",))
    if b.option("rope", "scaling") in ("dynamic", "longrope"):
        raise SpecError(f"{b.where}: rope.scaling: {b.option('rope', 'scaling')!r} does not go with mixer.kind "
                        "'compressed'", ("rope.scaling",))


def _entries(b: Builder, x: View, module: str, size: int) -> str:
    """The cache of entries [size] that modules named `module` make of x.

    Gates and values of the last tokens are in a cache of their own, whose window is what an entry is made of.
    """
    every, series = b.option("compressed", "every"), 1 + b.option("compressed", "overlap")
    rows = b.view(f"{module}_rows", 2 * series * size)
    b.linear(f"{module}_gate", x, View(rows.buffer, 0, series * size))
    b.linear(f"{module}_value", x, View(rows.buffer, series * size, series * size))
    last, entries = f"{b.prefix}{module}_rows", f"{b.prefix}{module}"
    b.caches[last] = Cache(last, 1, rows.width, 0, prefix=rows.width, every=1)
    b.emit("cache_write", (rows,), (), f"{module}_rows", cache=last)
    y = b.view(f"{module}_entry", size)
    b.emit("pool", (), (y,), module, {"bias": b.matrix(f"{module}_bias", every, series * size)}, cache=last,
           every=every, series=series)
    b.norm(f"{module}_norm", y, y)
    if b.option("rope", "enabled"):
        rotate(b, y, 1, size, f"{module}_rope", ago=every - 1)  # the position of the window's first token
    b.caches[entries] = Cache(entries, 1, size, 0, prefix=size, every=every)
    b.emit("cache_write", (y,), (), f"{module}_write", cache=entries)
    return entries


def _index(b: Builder, x: View, low: View) -> View:
    """Bits i32 [T, entries / 32] of the entries that each query sees: the best by entries of an index of its own."""
    heads, size = b.option("indexer", "heads"), b.option("indexer", "head_dim")
    if (context := b.option("stack", "context")) > MOST_INDEXED:
        raise SpecError(f"{b.where}: stack.context: an index has up to {MOST_INDEXED} positions, found {context}",
                        ("stack.context",))
    q = b.linear("index_q", low, b.view("index_q", heads * size))
    if b.option("rope", "enabled"):
        rotate(b, q, heads, size, "index_rope_q")
    entries = _entries(b, x, "index_pool", size)
    weights = b.linear("index_weights", x, b.view("index_weights", heads))
    chosen = b.view("chosen", -(-context // (32 * b.option("compressed", "every"))), dtype="i32")
    b.emit("index_select", (q, weights), (chosen,), "index_select", cache=entries, heads=heads,
           top_k=b.option("indexer", "top_k"))
    return chosen
