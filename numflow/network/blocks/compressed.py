"""Attention over the last tokens and over compressed entries, one entry for each window of earlier tokens.

All heads share one key per token, and the key is the value too. The key is rotated by its position, so each head's
output is rotated back by the query's position. Entries are pooled from windows of tokens (beside.py). An index may
select the entries that a query attends to.

Also here: attention whose query and output matrices are those of the experts that a router chose for the token.
"""

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.attention import attend, placed, position_biases
from numflow.network.blocks.beside import entries, index_of_entries
from numflow.network.blocks.experts import add_bias_of_experts
from numflow.network.blocks.projections import Heads
from numflow.network.blocks.rope import rotate
from numflow.network.steps.builder import Builder
from numflow.ops import Cache, View


def compressed_attention(b: Builder, x: View) -> View:
    """Mixer of kind "compressed": x [T, D] -> [T, D]."""
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
        rules["entries"] = entries(b, x, "pool", size)
        if b.option("indexer", "heads"):
            chosen = index_of_entries(b, x, low)
    y = b.view("attention", heads * size)
    b.emit("attention", (q, *chosen), (y,), "attention", position_biases(b, heads), cache=name, heads=heads,
           causal=True, **rules)
    if b.option("rope", "enabled"):
        rotate(b, y, heads, size, "rope_back", back=True)
    if groups := b.option("compressed", "out_groups"):
        if heads % groups:
            raise SpecError(f"{b.where}: compressed.out_groups: expected a divisor of attention.heads {heads}, found "
                            f"{groups}", ("compressed.out_groups", "attention.heads"))
        rank, attended = b.option("compressed", "out_rank"), y
        y = b.view("attention_groups", groups * rank)
        weight = b.head_matrices("attn_output_a", groups, rank, range(rank), attended.width // groups, "")
        b.emit("head_linear", (attended,), (y,), "attn_output_a", {"weight": weight}, heads=groups)
    return b.linear("attn_output", y, b.view("branch", x.width))


def _check(b: Builder, shape: Heads) -> None:
    """Refuse options that this attention does not have.

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


def attention_of_experts(b: Builder, x: View) -> View:
    """Mixture of attention heads (arXiv 2210.05144): x [T, D] -> [T, D].

    Each expert has a query matrix and an output matrix, with as many heads as there are key heads. The outputs of a
    token's chosen experts are summed with their gates. Attention runs once for each of the `chosen` choices; the
    queries of a choice are extracted by `expert_combine` with gates 1 and 0.
    """
    shape = Heads(*(b.option("attention", key) for key in ("kv_heads", "kv_heads", "head_dim", "value_dim")))
    experts, chosen = b.option("moe", "experts"), b.option("moe", "top_k")
    width = shape.kv_heads * shape.head_dim
    if shape.value_dim != shape.head_dim or not 1 <= chosen <= experts:
        raise SpecError(f"{b.where}: mixer.kind: 'experts' expects values as wide as keys, and 1 to moe.experts "
                        f"{experts} choices, found {shape.value_dim} and {shape.head_dim} columns, {chosen} choices",
                        ("mixer.kind", "attention.value_dim", "moe.top_k"))
    ids, gates = b.view("attn_route_ids", chosen, dtype="i32"), b.view("attn_route_gates", chosen)
    b.emit("moe_route", (b.linear("attn_router", x, b.view("attn_router", experts)),), (ids, gates), "attn_route",
           score=b.option("moe", "score"), normalize=b.option("moe", "normalize"))
    kv = b.view("kv", 2 * width)
    k, v = View(kv.buffer, 0, width), View(kv.buffer, width, width)
    for module, view in (("attn_k", k), ("attn_v", v)):
        b.linear(module, x, view, range(view.start, view.start + width) if b.option("attention", "qkv") == "concat"
                 else None)
    placed(b, [("k", k, shape.kv_heads)], shape)
    name = f"{b.prefix}self"
    cache = b.caches[name] = Cache(name, shape.kv_heads, shape.head_dim, shape.value_dim)
    b.emit("cache_write", (k, v), (), "cache_write", cache=name)
    queries, outputs = b.view("expert_queries", width, "routes"), b.view("expert_found", x.width, "routes")
    b.emit("expert_linear", (x, ids), (queries,), "attn_q_exps",
           {"weight": b.stack_of_matrices("attn_q_exps", experts, width, x.width)})
    output = b.stack_of_matrices("attn_output_exps", experts, x.width, width)
    q, y, one = b.view("q", width), b.view("attention", width), b.view("attn_choice", chosen)
    total, part = b.view("branch", x.width), b.view("attn_choice_found", x.width)
    for choice in range(chosen):
        shift = b.constant(f"choice.{choice}.{chosen}", np.eye(chosen, dtype=np.float32)[choice])
        b.emit("scale", (gates,), (one,), f"attn_choice.{choice}", {"shift": shift}, scale=0.0)
        b.emit("expert_combine", (queries, one), (q,), f"attn_query.{choice}")
        placed(b, [("q", q, shape.kv_heads)], shape)
        attend(b, q, y, cache, shape.kv_heads, ((), {}))
        b.emit("expert_linear", (y, ids), (outputs,), f"attn_output_exps.{choice}", {"weight": output})
        b.emit("mul", (gates, one), (one,), f"attn_gate.{choice}")
        target = part if choice else total
        b.emit("expert_combine", (outputs, one), (target,), f"attn_found.{choice}")
        if choice:
            b.emit("add", (total, part), (total,), f"attn_sum.{choice}")
    return add_bias_of_experts(b, "attn_output_bias", total)
