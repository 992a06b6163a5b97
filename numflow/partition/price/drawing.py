"""A placement as text: layers, memory use and exchanges of each device."""

from collections.abc import Mapping

from numflow.ops import EXCHANGES, param
from numflow.partition.cut.plan import DevicePart, Plan
from numflow.partition.price.price import MemoryEstimate

_BAR = 20


def draw(plan: Plan, memory: Mapping[str, MemoryEstimate] | None = None) -> list[str]:
    """Lines for each group of devices: devices, exchanges in the group, data sent to the next group."""
    lines = []
    for number, group in enumerate(plan.groups):
        parts = [plan.devices[i] for i in group]
        for part in parts:
            layers = ", ".join(f"{stack}layers {span.start}-{span.stop - 1}" for stack, span in part.layers.items())
            share = f"share {part.share:g}" if part.share != 1 else ""
            words = [f"device {part.name:<4}", layers or "no layers", _tokens(part), share,
                     _bar(memory[part.name]) if memory is not None else ""]
            corner = " " if len(parts) == 1 else "┌" if part is parts[0] else "└" if part is parts[-1] else "│"
            lines.append(f"{corner} {'  '.join(word for word in words if word)}")
        meetings = [step for step in parts[0].network.entries["main"] if step.op in ("all_reduce", "all_gather")]
        if meetings:
            counts = {op: sum(step.op == op for step in meetings) for op in ("all_reduce", "all_gather")}
            lines.append("  " + ", ".join(f"{count} {op}" for op, count in counts.items() if count) + " per batch")
        sent = [f"{step.inputs[0].width} numbers per token to device {plan.devices[step.params['peer']].name}"
                for part in parts for step in part.network.entries["main"] if step.op == "send"]
        if sent:
            more = f" and {len(sent) - 1} more" if len(sent) > 1 else ""
            lines += [f"  ▼ {sent[0]}{more}"]
        elif number + 1 < len(plan.groups):
            lines.append("  ▼")
    return lines


def exchanges(plan: Plan) -> dict[str, int]:
    """Number of exchange steps by op, over all devices and entries."""
    steps = [step for part in plan.devices for own in part.network.entries.values() for step in own]
    return {op: count for op in EXCHANGES if (count := sum(step.op == op for step in steps))}


def _tokens(part: DevicePart) -> str:
    """Token ids whose embeddings a device has, if not all: "tokens 0-24575"."""
    spans = {(param(step, "first"), part.network.weights[step.weights["table"]].shape[0])
             for steps in part.network.entries.values() for step in steps
             if step.op == "embed" and param(step, "vocabulary")}
    return ", ".join(f"tokens {first}-{first + rows - 1}" for first, rows in sorted(spans))


def _bar(memory: MemoryEstimate) -> str:
    """ "[########····        ] 9.1 of 16.0 GB": weights, then other used memory."""
    weights = min(_BAR, round(_BAR * memory.weights / memory.limit))
    used = min(_BAR, round(_BAR * memory.used / memory.limit))
    bar = "█" * weights + "▒" * (used - weights) + " " * (_BAR - max(used, weights))
    return f"[{bar}] {memory.used / 1e9:.2f} of {memory.limit / 1e9:.1f} GB{'' if memory.fits else ': too little'}"
