"""Checks of a network's steps against the op table: arity, names, shapes and dtypes."""

from functools import cache
from math import isqrt

from numflow.errors import NetworkError, did_you_mean
from numflow.network.steps.cache_checks import (
    attention,
    block_select,
    cache_write,
    expect,
    index_select,
    index_tokens,
    pool,
    rows,
)
from numflow.ops import (
    ACTIVATIONS,
    ADAPTING,
    CONV_KINDS,
    EXCHANGES,
    OPS,
    REQUIRED,
    Network,
    Op,
    Step,
    op_of,
    param,
    states_of,
)


def verify(network: Network) -> None:
    """Check every step (arity, shapes, dtypes) and that nothing is read before it is written.

    Raises:
        NetworkError: naming the step, what was expected and what was found.
    """
    for entry, steps in network.entries.items():
        written = {x.buffer: {(x.start, x.start + x.width)} for x in network.inputs.values()}
        for step in steps:
            check_step(step, network)
            for view in step.inputs:
                if not _covered(view.start, view.start + view.width, written.get(view.buffer, [])):
                    raise NetworkError(f"{entry}: {step}: reads {view} before it is written")
            for view in step.outputs:
                written.setdefault(view.buffer, set()).add((view.start, view.start + view.width))
    writers = {view.buffer for steps in network.entries.values() for step in steps for view in step.outputs}
    for name, view in network.outputs.items():
        if view.buffer not in writers:
            raise NetworkError(f"output {name!r} is buffer {view.buffer!r}, which no step writes")


def _covered(start: int, stop: int, spans: list[tuple[int, int]]) -> bool:
    for first, last in sorted(spans):
        if first <= start < last:
            start = last
    return start >= stop


def check_step(step: Step, network: Network) -> None:
    """Arity, names, rows, widths and dtypes of one step.

    Raises:
        NetworkError: naming the step, what was expected and what was found.
    """
    op = op_of(step)
    if op is None:
        raise NetworkError(f"{step}: no op named {step.op!r}{did_you_mean(step.op, OPS)}")
    _check_names(step, op)
    for view in (*step.inputs, *step.outputs):
        buffer = network.buffers.get(view.buffer)
        if buffer is None:
            raise NetworkError(f"{step}: no buffer named {view.buffer!r}{did_you_mean(view.buffer, network.buffers)}")
        if view.start < 0 or view.width <= 0 or view.start + view.width > buffer.width:
            raise NetworkError(f"{step}: {view} is outside buffer {buffer.name!r} of width {buffer.width}")
    for role, name in step.weights.items():
        if name not in network.weights:
            raise NetworkError(f"{step}: {role} {name!r} is no weight of this network")
    for state in states_of(step).values():
        if state not in network.states:
            raise NetworkError(f"{step}: no state named {state!r}{did_you_mean(state, network.states)}")
    _SHAPES[step.op](step, network)


def _check_names(step: Step, op: Op) -> None:
    least, roles, needed = _names_of(op.name)
    if not least <= len(step.inputs) <= len(op.inputs):
        raise NetworkError(f"{step}: {op.name} takes inputs {op.inputs}, got {len(step.inputs)}")
    if len(step.outputs) != len(op.outputs):
        raise NetworkError(f"{step}: {op.name} has outputs {op.outputs}, got {len(step.outputs)}")
    for role in step.weights:
        if role not in roles:
            raise NetworkError(f"{step}: {op.name} has no weight {role!r}{did_you_mean(role, roles)}")
    for role in needed:
        if role not in step.weights:
            raise NetworkError(f"{step}: {op.name} needs weight {role!r}")
    for key in step.params:
        if key not in op.params:
            raise NetworkError(f"{step}: {op.name} has no parameter {key!r}{did_you_mean(key, op.params)}")
    for key, default in op.params.items():
        if default is REQUIRED and key not in step.params:
            raise NetworkError(f"{step}: {op.name} needs parameter {key!r}")


@cache
def _names_of(name: str) -> tuple[int, set[str], list[str]]:
    """An op's minimal number of inputs, the roles of its weights, and the required roles."""
    op = OPS.get(name) or EXCHANGES.get(name) or ADAPTING[name]
    return (sum(not each.endswith("?") for each in op.inputs), {role.rstrip("?") for role in op.weights},
            [role for role in op.weights if not role.endswith("?")])


# Shape rules, one function per op. Arity is checked before, by OPS.

def _same(step: Step, network: Network) -> None:
    """Every view has the shape of the first output, in f32."""
    y = step.outputs[0]
    for x in (*step.inputs, *step.outputs):
        buffer = network.buffers[x.buffer]
        if (x.width, buffer.rows, buffer.dtype) == (y.width, rows(step, network, y), "f32"):
            continue  # most steps are right: no message is formatted for them
        expect(step, f"width of {x}", y.width, x.width)
        expect(step, f"rows of {x}", rows(step, network, y), rows(step, network, x))
        expect(step, f"dtype of {x}", "f32", network.buffers[x.buffer].dtype)


def _table(step: Step, network: Network) -> None:
    _same(step, network)
    expect(step, "rows", "tokens", rows(step, network, step.outputs[0]))
    expect(step, "columns of table", step.outputs[0].width, network.weights[step.weights["table"]].shape[-1])


def _ngram_ids(step: Step, network: Network) -> None:
    y, state, count = step.outputs[0], network.states[param(step, "state")], len(param(step, "multipliers")) - 1
    expect(step, "dtype of the output", "i32", network.buffers[y.buffer].dtype)
    expect(step, "rows", "tokens", rows(step, network, y))
    expect(step, "width of the output", len(param(step, "sizes")), y.width)
    expect(step, f"shape of {state.name!r}", (count,), state.shape)
    if count < 1 or y.width % count or min(param(step, "sizes")) < 1:
        raise NetworkError(f"{step}: {y.width} parts with rows should be shared by n-grams of 2 .. {count + 1} tokens")


def _embed_ids(step: Step, network: Network) -> None:
    (ids,), (y,), table = step.inputs, step.outputs, network.weights[step.weights["table"]]
    expect(step, "dtype of ids", "i32", network.buffers[ids.buffer].dtype)
    expect(step, "rows of the output", rows(step, network, ids), rows(step, network, y))
    expect(step, "width of the output", ids.width * table.shape[-1], y.width)
    _part(step, network)


def _embed(step: Step, network: Network) -> None:
    _table(step, network)
    _part(step, network)


def _part(step: Step, network: Network) -> None:
    """The table is complete, or consists of rows of a table of `vocabulary` rows."""
    rows, first, vocabulary = (network.weights[step.weights["table"]].shape[0], param(step, "first"),
                               param(step, "vocabulary"))
    if not vocabulary:
        expect(step, "first row of a whole table", 0, first)
    elif first < 0 or first + rows > vocabulary:
        raise NetworkError(f"{step}: rows {first} .. {first + rows - 1} are not all of a table of {vocabulary} rows")


def _norm(step: Step, network: Network) -> None:
    _same(step, network)
    width, groups = step.outputs[0].width, param(step, "groups")
    if width % groups:
        raise NetworkError(f"{step}: {groups} groups do not divide width {width}")
    for role, name in step.weights.items():
        shape = network.weights[name].shape
        if shape not in ((width,), (width // groups,)):
            raise NetworkError(f"{step}: {role} {name!r} should be [{width}] or one group's part, is {list(shape)}")


def _linear(step: Step, network: Network) -> None:
    x, y = step.inputs[0], step.outputs[0]
    weight = network.weights[step.weights["weight"]]
    expect(step, f"shape of {weight.name!r}", (y.width, x.width), weight.shape)
    expect(step, "rows of the output", rows(step, network, x), rows(step, network, y))
    if "bias" in step.weights:
        expect(step, "shape of bias", (y.width,), network.weights[step.weights["bias"]].shape)


def _head_linear(step: Step, network: Network) -> None:
    x, y, heads = step.inputs[0], step.outputs[0], param(step, "heads")
    weight = network.weights[step.weights["weight"]]
    if x.width % heads or y.width % heads:
        raise NetworkError(f"{step}: {heads} heads do not divide {x.width} and {y.width} columns")
    expect(step, f"matrices of {weight.name!r}", heads, weight.groups)
    expect(step, f"shape of {weight.name!r}", (y.width, x.width // heads), weight.shape)
    expect(step, "rows of the output", rows(step, network, x), rows(step, network, y))


def _rope_angles(step: Step, network: Network) -> None:
    for role, name in step.weights.items():
        expect(step, f"shape of {role}", (step.outputs[0].width // 2,), network.weights[name].shape)
    if "long" in step.weights and param(step, "border") < 1:
        raise NetworkError(f"{step}: frequencies beyond a border need the border, it is {param(step, 'border')}")


def _rope(step: Step, network: Network) -> None:
    x, angles = step.inputs
    expect(step, "width of the output", x.width, step.outputs[0].width)
    expect(step, "width", param(step, "heads") * param(step, "head_dim"), x.width)
    if param(step, "start") + angles.width > param(step, "head_dim"):
        raise NetworkError(f"{step}: {angles.width} rotated columns do not fit heads of {param(step, 'head_dim')}")
    if param(step, "pairing") not in ("half", "adjacent"):
        raise NetworkError(f"{step}: pairing should be 'half' or 'adjacent', is {param(step, 'pairing')!r}")


def _head_concat(step: Step, network: Network) -> None:
    a, b = step.inputs
    heads, width = param(step, "heads"), step.outputs[0].width
    if width not in (a.width + b.width, a.width + heads * b.width):
        raise NetworkError(f"{step}: {heads} heads of a [{a.width}] and b [{b.width}] do not make {width} columns")


def _causal_conv(step: Step, network: Network) -> None:
    (x,), (y,), state = step.inputs, step.outputs, network.states[param(step, "state")]
    _same(step, network)
    weight = network.weights[step.weights["weight"]].shape
    if len(weight) != 2 or weight[0] != x.width or weight[1] < 2:
        raise NetworkError(f"{step}: weight should be [{x.width}, 2 taps or more], is {list(weight)}")
    if "bias" in step.weights:
        expect(step, "shape of bias", (x.width,), network.weights[step.weights["bias"]].shape)
    expect(step, f"shape of {state.name!r}", (weight[1] - 1, x.width), state.shape)
    if x.overlaps(y):
        raise NetworkError(f"{step}: rows of {x} are read after {y} is written: they should not overlap")
    if param(step, "kind") not in CONV_KINDS:
        raise NetworkError(f"{step}: kind should be one of {', '.join(CONV_KINDS)}, is {param(step, 'kind')!r}")


def _linear_attention(step: Step, network: Network) -> None:
    (q, k, v, *others), y = step.inputs, step.outputs[0]
    heads, key_heads = param(step, "heads"), param(step, "key_heads")
    if heads % key_heads or q.width % key_heads or v.width % heads:
        raise NetworkError(f"{step}: {heads} heads do not share {key_heads} of {q.width} columns and {v.width} columns")
    k_dim = q.width // key_heads
    expect(step, "width of k", q.width, k.width)
    expect(step, "width of the output", v.width, y.width)
    expect(step, "shape of the state", (heads, k_dim, v.width // heads), network.states[param(step, "state")].shape)
    for what, view, widths in zip(("steps", "beta"), others, ((heads, heads * k_dim), (heads,))):
        if view.width not in widths:
            raise NetworkError(f"{step}: width of {what} should be one of {widths}, is {view.width}")
    if param(step, "scaled") and not others:
        raise NetworkError(f"{step}: values are scaled by steps, and there are none")
    for role, sizes in (("rate", (heads, heads * k_dim)), ("skip", (heads,))):
        if role in step.weights and network.weights[step.weights[role]].shape not in [(size,) for size in sizes]:
            raise NetworkError(f"{step}: {role} should have one of {sizes} numbers")


def _by_channel(step: Step, network: Network) -> None:
    """Weights and states have one value per column, the state of `wkv` three."""
    _same(step, network)
    width = step.outputs[0].width
    for name in step.weights.values():
        expect(step, f"shape of {name!r}", (width,), network.weights[name].shape)
    for name in states_of(step).values():
        expect(step, f"shape of {name!r}", (3, width) if step.op == "wkv" else (width,), network.states[name].shape)


def _act(step: Step, network: Network) -> None:
    _same(step, network)
    # Clamped activations need gate and up together; xielu has no gate.
    kinds = [k for k in ACTIVATIONS if (k != "xielu" if step.op == "act_mul" else not k.endswith("_clamp"))]
    if param(step, "kind") not in kinds:
        raise NetworkError(f"{step}: no activation {param(step, 'kind')!r}{did_you_mean(param(step, 'kind'), kinds)}")


def _scale_by_position(step: Step, network: Network) -> None:
    _same(step, network)
    expect(step, "rows", "tokens", rows(step, network, step.outputs[0]))
    if param(step, "length") < 1:
        raise NetworkError(f"{step}: length should be 1 or more, is {param(step, 'length')}")


def _scale(step: Step, network: Network) -> None:
    _same(step, network)
    for role, name in step.weights.items():
        expect(step, f"shape of {role}", (step.outputs[0].width,), network.weights[name].shape)


def _by_group(step: Step, network: Network) -> None:
    expect(step, "width of the output", step.inputs[0].width, step.outputs[0].width)
    expect(step, "columns left over", 0, step.outputs[0].width % step.inputs[1].width)


def _mix(step: Step, network: Network) -> None:
    (base, x, gates), (y,), parts = step.inputs, step.outputs, param(step, "parts")
    expect(step, "width of the output and of the gates", (base.width, gates.width * (base.width // parts)),
            (y.width, parts * x.width))
    if x.overlaps(y):
        raise NetworkError(f"{step}: the output is made while x is read: it should be another buffer")


def _balance(step: Step, network: Network) -> None:
    _same(step, network)
    if step.inputs[0].overlaps(step.outputs[0]):
        raise NetworkError(f"{step}: the output is made while x is read: it should be another buffer")
    if isqrt(step.outputs[0].width) ** 2 != step.outputs[0].width or param(step, "times") < 1:
        raise NetworkError(f"{step}: expected a square matrix in each row, and times of 1 or more")


def _permute(step: Step, network: Network) -> None:
    (x,), (y,) = step.inputs, step.outputs
    expect(step, "width of the output", x.width, y.width)
    expect(step, "shape of the order", (x.width,), network.weights[step.weights["order"]].shape)
    if x.overlaps(y):
        raise NetworkError(f"{step}: the output is made while x is read: it should be another buffer")


def _select(step: Step, network: Network) -> None:
    expect(step, "rows of the output", "logits", rows(step, network, step.outputs[0]))
    expect(step, "width of the output", step.inputs[0].width, step.outputs[0].width)


def _route(step: Step, network: Network) -> None:
    ids, gates = step.outputs
    expect(step, "width of gates", ids.width, gates.width)
    expect(step, "dtype of ids", "i32", network.buffers[ids.buffer].dtype)
    for role, name in step.weights.items():
        expect(step, f"shape of {role}", (step.inputs[0].width,), network.weights[name].shape)
    for view in step.inputs[1:]:
        expect(step, "width of experts", ids.width, view.width)
        if param(step, "groups") > 1 or param(step, "score") == "sparsemixer" or "bias" in step.weights:
            raise NetworkError(f"{step}: experts that are given are not chosen by groups, by a bias or one by one")
    if param(step, "score") == "sparsemixer" and ("bias" in step.weights or param(step, "groups") > 1):
        raise NetworkError(f"{step}: 'sparsemixer' has neither a bias nor groups")
    if ids.width > step.inputs[0].width:
        raise NetworkError(f"{step}: {ids.width} experts per token, but only {step.inputs[0].width} experts")


def _expert_linear(step: Step, network: Network) -> None:
    x, y = step.inputs[0], step.outputs[0]
    weight = network.weights[step.weights["weight"]]
    expect(step, f"shape of {weight.name!r}", (weight.groups * y.width, x.width), weight.shape)
    expect(step, "rows of the output", "routes", rows(step, network, y))


def _combine(step: Step, network: Network) -> None:
    routes = step.inputs[0] if step.op == "expert_combine" else step.outputs[0]
    expect(step, f"rows of {routes}", "routes", rows(step, network, routes))
    expect(step, "width of the output", step.inputs[0].width, step.outputs[0].width)


def _all_reduce(step: Step, network: Network) -> None:
    _same(step, network)
    group, adds = param(step, "group"), param(step, "adds")
    if not adds or not set(adds) <= set(group):
        raise NetworkError(f"{step}: devices {adds} that add should be some of the group {group}")


def _all_gather(step: Step, network: Network) -> None:
    group, spans, y = param(step, "group"), param(step, "spans"), step.outputs[0]
    expect(step, "number of spans", len(group), len(spans))
    if not _covered(0, y.width, list(spans)) or max(end for _, end in spans) > y.width:
        raise NetworkError(f"{step}: spans {spans} do not make {y.width} columns")
    for x in step.inputs:
        expect(step, "rows of the output", rows(step, network, x), rows(step, network, y))
        if x.width not in {end - begin for begin, end in spans}:
            raise NetworkError(f"{step}: {x.width} columns are none of the spans {spans}")


def _adapt(step: Step, network: Network) -> None:
    expect(step, "output", step.inputs[0 if step.op == "adapt_rows" else 1], step.outputs[0])
    if len(step.inputs) == 3:
        expect(step, "rows of the output", "routes", rows(step, network, step.outputs[0]))
        expect(step, "dtype of ids", "i32", network.buffers[step.inputs[2].buffer].dtype)
    else:
        expect(step, "rows of the input", rows(step, network, step.outputs[0]), rows(step, network, step.inputs[0]))


_SHAPES = {
    "embed": _embed, "ngram_ids": _ngram_ids, "embed_ids": _embed_ids, "embed_position": _table, "embed_type": _table,
    "rms_norm": _norm, "layer_norm": _norm, "linear": _linear,
    "rope_angles": _rope_angles, "rope": _rope, "head_concat": _head_concat,
    "head_linear": _head_linear, "cache_write": cache_write, "pool": pool, "index_select": index_select,
    "index_tokens": index_tokens, "block_select": block_select, "attention": attention, "act": _act, "act_mul": _act,
    "gate_rows": _by_group, "permute": _permute, "mul": _same, "causal_conv": _causal_conv, "add": _same,
    "scale": _scale, "scale_by_position": _scale_by_position,
    "sparsify": _same, "match_rms": _by_group, "mix": _mix, "balance": _balance,
    "softcap": _same, "clamp": _same, "copy": _same, "signed_sqrt": _same,
    "select_rows": _select, "adapt": _adapt, "adapt_rows": _adapt,
    "moe_route": _route, "expert_scale": _combine, "expert_linear": _expert_linear, "expert_combine": _combine,
    "linear_attention": _linear_attention, **dict.fromkeys(("softplus", "gated_recurrence", "wkv"), _by_channel),
    **dict.fromkeys(("send", "receive"), lambda step, network: None),  # any shape: the other device determines it
    "all_reduce": _all_reduce, "all_gather": _all_gather,
}
