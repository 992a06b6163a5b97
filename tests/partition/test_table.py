"""The table of a cut lists the contents of the devices."""

from numflow.lab.shapes import Shape, random_network
from numflow.partition.cut.cut import partition
from numflow.partition.cut.table import cut_table

SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocabulary=100, context=32)


def table(devices):
    plan = partition(random_network(SHAPE, "F32", fuse=False)[0], devices)
    return plan, {(row.group, row.step): row for row in cut_table(plan)}


def test_by_tensor():
    plan, rows = table("0&1")
    q = rows[0, "attn_q+attn_k+attn_v"]
    assert (q.how, q.layers, q.then) == ("column-parallel", "0-1", "")
    assert q.spans == ("attn_q 0:32, attn_k 0:16, attn_v 0:16", "attn_q 32:64, attn_k 16:32, attn_v 16:32")
    assert rows[0, "attention"].spans == ("2 heads", "2 heads")
    down = rows[0, "ffn_down"]
    assert (down.how, down.then) == ("row-parallel", "all_reduce")
    assert down.spans == ("ffn_down columns 0:48", "ffn_down columns 48:96")
    assert (rows[0, "attn_norm"].how, rows[0, "token_embd"].how) == ("replicated", "tokens")
    assert rows[0, "output"].then == "all_gather"
    exchanges = sum(len(range(*map(int, (row.layers or "0-0").split("-")))) + 1 if row.then else 0
                    for row in rows.values())
    steps = [step for step in plan.devices[0].network.entries["main"] if step.op in ("all_reduce", "all_gather")]
    assert exchanges == len(steps)


def test_both_ways_and_alone():
    _, rows = table("0;1&2")
    assert rows[0, "ffn_down"].how == "whole" and rows[0, "ffn_down"].layers == "0"
    assert rows[1, "ffn_down"].spans == ("ffn_down columns 0:48", "ffn_down columns 48:96")
    assert rows[1, "ffn_down"].layers == "1"
