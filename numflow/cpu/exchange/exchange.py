"""Collectives of devices (ops.EXCHANGES) through the memory of a World (world.py).

Every device computes the sums itself, in the order of the devices: the result does not depend on the order of arrival,
nor on whether devices are threads or processes.
"""

from typing import Any

import numpy as np

from numflow.cpu.exchange.world import Channel
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.errors import DeviceError
from numflow.ops import Step, View, param

_CODE = Code("numflow.cpu.exchange.exchange_kernels")
_SHARED = "header rows width x x_stride y y_stride abort patience my_line slots slot_bytes"  # x, y: 0 if there is none
GROUP = slots(f"{_SHARED} lines n_lines members me table count")
PAIR = slots(f"{_SHARED} their_line their_count ring")


def is_remote(step: Step, ctx) -> bool:
    """Whether a step's peer is outside of this world's memory: Python then transfers the value (by_host)."""
    return step.op in ("send", "receive") and ctx.world is not None and ctx.world.remote is not None \
        and param(step, "peer") not in ctx.world.threads


def by_host(step: Step, ctx) -> None:
    """Do a step with a remote device."""
    (view,), peer = (*step.inputs, *step.outputs), param(step, "peer")
    values = ctx.buffers.columns(view, int(ctx.header_fields[ctx.rows(view)]))
    if step.op == "send":
        ctx.world.remote.put(ctx.device, peer, values.copy())
    else:
        values[:] = ctx.world.remote.take(peer, ctx.device)


def send(step: Step, ctx) -> list[Call]:
    """x f32 or i32 [rows, D] to device `peer`."""
    if is_remote(step, ctx):
        return [Call.of(step, _CODE.kernel("nothing"))]
    return _pair(step, ctx, _CODE.kernel("send"), ctx.device, param(step, "peer"))


def receive(step: Step, ctx) -> list[Call]:
    """y f32 or i32 [rows, D] from device `peer`."""
    if is_remote(step, ctx):
        return [Call.of(step, _CODE.kernel("nothing"))]
    return _pair(step, ctx, _CODE.kernel("receive"), param(step, "peer"), ctx.device)


def all_reduce(step: Step, ctx) -> list[Call]:
    """x f32 [rows, D] of the devices `adds` -> y f32 [rows, D]."""
    group, adds = tuple(param(step, "group")), param(step, "adds")
    table = np.array([group.index(device) for device in adds], np.int64)
    return _group(step, ctx, _CODE.kernel("all_reduce"), group, table)


def all_gather(step: Step, ctx) -> list[Call]:
    """x f32 [rows, D_i] of each device -> y f32 [rows, D]."""
    spans = np.array(param(step, "spans"), np.int64)
    return _group(step, ctx, _CODE.kernel("all_gather"), tuple(param(step, "group")), spans)


def _channel(step: Step, ctx, kind: str, devices: tuple[int, ...]) -> Channel:
    if ctx.world is None:
        raise DeviceError(f"{step}: one device's part of a plan cannot run without the other devices")
    return ctx.world.channels[kind, devices]


def _shared_slots(step: Step, ctx, channel: Channel) -> dict[str, Any]:
    base, shape = ctx.world.address, (*step.outputs, *step.inputs)[0]
    x, y = step.inputs[0] if step.inputs else None, step.outputs[0] if step.outputs else None
    return {"header": ctx.header, "rows": ctx.rows(shape), "width": shape.width, **_strided(ctx, "x", x),
            **_strided(ctx, "y", y), "abort": base, "patience": ctx.world.patience,
            "my_line": base + channel.first_line(ctx.device), "slots": base + channel.slots,
            "slot_bytes": channel.slot_bytes}


def _strided(ctx, name: str, view: View | None) -> dict[str, int]:
    return {name: 0, f"{name}_stride": 0} if view is None else ctx.strided(name, view)


def _group(step: Step, ctx, fn, group: tuple[int, ...], table: np.ndarray) -> list[Call]:
    channel = _channel(step, ctx, "group", group)
    return [Call.named(step, fn, GROUP, **_shared_slots(step, ctx, channel), lines=ctx.world.address + channel.lines,
                       n_lines=sum(channel.threads), members=len(group), me=group.index(ctx.device), table=table,
                       count=len(table))]


def _pair(step: Step, ctx, fn, sender: int, receiver: int) -> list[Call]:
    channel = _channel(step, ctx, "pair", (sender, receiver))
    peer = receiver if sender == ctx.device else sender
    return [Call.named(step, fn, PAIR, **_shared_slots(step, ctx, channel),
                       their_line=ctx.world.address + channel.first_line(peer),
                       their_count=channel.threads[channel.devices.index(peer)], ring=channel.ring)]


BINDERS = {"send": send, "receive": receive, "all_reduce": all_reduce, "all_gather": all_gather}
