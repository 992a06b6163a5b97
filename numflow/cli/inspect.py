"""`numflow inspect`: a model's network, tensors and memory, from file headers only."""

from dataclasses import asdict
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.running import print_json
from numflow.cli.tables import print_fields, print_table, printable
from numflow.errors import NumflowError

_SHOWN = 6  # name prefixes of unused tensors that are shown


def inspect(
    model: options.ModelArgument,
    spec: options.SpecFile = None,
    full: Annotated[bool, typer.Option("--full", help="Show every step, instead of equal layers in one row.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every stored tensor.")] = False,
    groups: Annotated[bool, typer.Option("--groups", help="Also list the groups of steps that are fused into one "
                                         "kernel, for CPU and GPU.")] = False,
    devices: options.Devices = None,
    json: options.Json = False,
    offline: options.Offline = False,
) -> None:
    """Show a model's network, tensors and memory.

    Only the headers of the model's files are read, not the weights. With --devices the split over devices is shown
    too: the layers of each device, and its rows, columns or heads of every step.
    """
    from numflow import formats, network, registry

    checkpoint = formats.open_checkpoint(registry.resolve(model, offline=offline))
    try:
        built = network.build(network.choose_spec(checkpoint, spec), checkpoint)
    except NumflowError:
        if not json:  # the file's facts help to understand the error
            print_fields(_file_facts(checkpoint))
            _print_tensors(checkpoint)
            print(flush=True)
        raise
    placed = None if devices is None else _placed(checkpoint, spec, devices)
    if json:
        print_json(_as_dict(built, checkpoint, full, tensors) | ({} if placed is None else {
            "devices": placed[1], "cut": [asdict(row) for row in placed[2]]})
            | ({"groups": [asdict(group) for group in _groups(built)]} if groups else {}))
        return
    print_fields([*_file_facts(checkpoint), ("spec", built.name), *_unused(built, checkpoint),
                  *_memory(built, checkpoint),
                  *((key, value) for key, value in built.facts.items() if value is not None)])
    print()
    _print_types(built, checkpoint)
    print()
    if placed is not None:
        print(printable("\n".join(placed[0]), keep="\n"), end="\n\n")
        _print_placed(placed[1])
        print()
        _print_cut(placed[2])
        print()
    if groups:
        print_table(["device", "layers", "pattern", "steps", "operand"],
                    [(row.device, row.layers, row.pattern, " + ".join(row.steps), row.operand)
                     for row in _groups(built)])
        print()
    print_network(built, checkpoint, full)
    if tensors:
        print()
        _print_tensors(checkpoint)


def _placed(checkpoint, spec, devices: str) -> tuple[list[str], list[dict], list]:
    """A drawing of the plan, facts of each device, and the rows of the table of cut steps."""
    from numflow import network
    from numflow.network import describe
    from numflow.partition.cut.cut import partition
    from numflow.partition.cut.table import cut_table
    from numflow.partition.price.drawing import draw

    plan = partition(network.build(network.choose_spec(checkpoint, spec), checkpoint, fuse=False), devices)
    facts = [{"device": part.name, "group": part.group, "share": part.share,
              "layers": {stack: [span.start, span.stop - 1] for stack, span in part.layers.items() if len(span)},
              "stored_bytes": sum(describe.stored_bytes(part.network, checkpoint, name)
                                  for name in part.network.weights),
              "cache_bytes_per_token": describe.cache_bytes_per_token(part.network),
              "state_bytes": describe.state_bytes(part.network),
              "ops": dict(describe.op_counts(part.network))} for part in plan.devices]
    return draw(plan), facts, cut_table(plan)


def _groups(built) -> list:
    """Fused groups of the CPU and of GPUs with default activations; equal layers share a row."""
    from numflow.cpu import patterns as cpu
    from numflow.cuda import patterns as cuda
    from numflow.engine.options import LoadOptions

    return [*cpu.described(built, LoadOptions.activations), *cuda.described(built, "int8")]


def _print_cut(rows) -> None:
    """Print a row for each step, with the part of each device."""
    print_table(["group", "layers", "step", "shared", "device by device", "then"],
                [(row.group, row.layers, row.step, row.how, " | ".join(row.spans), row.then) for row in rows])


def _print_placed(facts: list[dict]) -> None:
    from numflow.registry.progress import megabytes

    exchanges = ("send", "receive", "all_reduce", "all_gather")
    states = [">state per text"] * any(f["state_bytes"] for f in facts)
    print_table(["device", "group", "layers", ">weights", ">cache per token", *states, *(f">{op}" for op in exchanges)],
                [(f["device"], f["group"], ", ".join(f"{stack}{a}-{b}" for stack, (a, b) in f["layers"].items()),
                  megabytes(f["stored_bytes"]), megabytes(f["cache_bytes_per_token"]),
                  *(megabytes(f["state_bytes"]) for _ in states),
                  *(f["ops"].get(op, 0) for op in exchanges)) for f in facts])


def print_network(network, checkpoint, full: bool) -> None:
    """Print the steps as a table. full: one row for each step, else equal layers share a row."""
    from numflow.network import describe
    from numflow.registry.progress import megabytes

    several = len(network.entries) > 1
    if full:
        print_table(["step", "op", "shapes", "reads and writes"],
                    [(f"{entry} {step.label}" if several else step.label, step.op, describe.shapes(step, network),
                      str(step).split(": ", 1)[1]) for entry, steps in network.entries.items() for step in steps])
        return
    print_table(["step", "layers", "op", "shapes", ">stored"],
                [(f"{g.entry} {g.label}" if several else g.label, g.layers, g.op, g.shapes,
                  megabytes(g.stored_bytes) if g.stored_bytes else "")
                 for g in describe.group_steps(network, checkpoint)])


def _file_facts(checkpoint) -> list[tuple[str, object]]:
    from numflow.registry.progress import megabytes

    return [("path", checkpoint.path), ("format", checkpoint.format),
            *([("quantised", checkpoint.quantised)] if checkpoint.quantised else []),
            ("tensors", f"{len(checkpoint.tensors)}, {megabytes(checkpoint.nbytes)}")]


def _unused(network, checkpoint) -> list[tuple[str, str]]:
    """Tensors that the network does not use, such as the part for images or audio."""
    from numflow.network import describe
    from numflow.registry.progress import megabytes

    if not (found := describe.unused(network, checkpoint)):
        return []
    count, size = (sum(numbers) for numbers in zip(*found.values(), strict=True))
    names = ", ".join(list(found)[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    return [("not used", f"{names}: {count} tensors, {megabytes(size)}")]


def _memory(network, checkpoint) -> list[tuple[str, object]]:
    from numflow.cpu.estimate import weight_bytes
    from numflow.network import describe
    from numflow.registry.progress import megabytes

    per_token = describe.cache_bytes_per_token(network)
    used = sum(size for _, _, size in describe.tensor_types(network, checkpoint).values())
    weights = sum(count for _, count, _ in describe.tensor_types(network, checkpoint).values())
    context = network.facts.get("context") or 0
    whole, windows = describe.cache_bytes(network, context), describe.window_bytes(network)
    kind = "16-bit keys and values" + " and float32 entries" * any(one.every for one in network.caches.values())
    if per_token and windows:
        cache = f"{megabytes(per_token)} per token of {kind} beside {megabytes(windows)} of windows, "
    else:
        cache = f"{megabytes(per_token or windows)} per {'token' if per_token else 'text'} of {kind}, "
    return [("weights", f"{weights / 1e6:.1f} M in {megabytes(used)}, {8 * used / max(weights, 1):.2f} bits each"),
            ("memory", f"{megabytes(sum(map(weight_bytes, network.weights.values())))} of weights on the CPU"),
            ("cache", f"{cache}{megabytes(whole)} for {context} tokens" if per_token or windows else "none"),
            *_states(network)]


def _states(network) -> list[tuple[str, str]]:
    """Size of the recurrent state of a text, and its size in a KV block of the CPU for each state type."""
    from numflow.cpu.state.matrix_state import slot_bytes
    from numflow.network import describe
    from numflow.network.states import matrix_states
    from numflow.quant.state import STATE_TYPES
    from numflow.registry.progress import megabytes

    if not (size := describe.state_bytes(network)):
        return []
    taken = [f"{megabytes(sum(slot_bytes(network, dtype).values()))} in {dtype}"
             for dtype in (STATE_TYPES if matrix_states(network) else ("f32",))]
    return [("state", f"{megabytes(size)} per text; with what a block adds {', '.join(taken)} on the CPU")]


def _lengths(context: int) -> list[int]:
    """Text lengths in powers of four times 512 below the context length, and the context length."""
    return [*(n for n in (512, 2048, 8192, 32768, 131072) if n < context), context]


def _print_types(network, checkpoint) -> None:
    from numflow.network import describe
    from numflow.registry.progress import megabytes

    print_table(["type", ">tensors", ">weights", ">stored"],
                [(name, count, f"{weights:,}", megabytes(size))
                 for name, (count, weights, size) in describe.tensor_types(network, checkpoint).items()])


def _print_tensors(checkpoint) -> None:
    print_table(["tensor", "type", "shape", ">bytes"],
                [(t.name, t.type.name, "x".join(map(str, t.shape)), f"{t.nbytes:,}")
                 for t in checkpoint.tensors.values()])


def _method(checkpoint) -> dict:
    return {"quantised": checkpoint.quantised} if checkpoint.quantised else {}


def _as_dict(network, checkpoint, full: bool, tensors: bool) -> dict:
    from numflow.cpu.estimate import weight_bytes
    from numflow.network import describe

    result = {
        "path": checkpoint.path, "format": checkpoint.format, **_method(checkpoint), "spec": network.name,
        "facts": dict(network.facts),
        "not_used": {name: {"tensors": count, "bytes": size}
                     for name, (count, size) in describe.unused(network, checkpoint).items()},
        "stored_bytes": checkpoint.nbytes, "memory_bytes": sum(map(weight_bytes, network.weights.values())),
        "cache_bytes_per_token": describe.cache_bytes_per_token(network),
        "state_bytes": describe.state_bytes(network),
        "cache_bytes": {str(n): describe.cache_bytes(network, n) for n in _lengths(network.facts.get("context") or 0)},
        "types": {name: {"tensors": count, "weights": weights, "bytes": size}
                  for name, (count, weights, size) in describe.tensor_types(network, checkpoint).items()},
    }
    if full:
        result["steps"] = [{"entry": entry, "label": step.label, "op": step.op, "inputs": list(map(str, step.inputs)),
                            "outputs": list(map(str, step.outputs)), "weights": dict(step.weights),
                            "params": dict(step.params)} for entry, steps in network.entries.items() for step in steps]
    else:
        result["steps"] = [asdict(group) for group in describe.group_steps(network, checkpoint)]
    if tensors:
        result["tensors"] = [{"name": t.name, "type": t.type.name, "shape": t.shape, "bytes": t.nbytes}
                             for t in checkpoint.tensors.values()]
    return result
