"""`numflow plan`: compare ways to split a model over devices."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.running import asked_name, print_json
from numflow.cli.tables import print_table
from numflow.errors import RequestError


def plan(
    model: options.Model = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", show_default="cpu; with --cluster cuda",
                                               help="Device type: cpu or cuda. With cuda a number in --devices is a "
                                               "GPU (of this machine without --cluster), and cpu is the CPU.")] = None,
    devices: Annotated[str, typer.Option(metavar="TEXT", show_default="every device of the cluster",
                                         help="Devices that may be used, such as '0;1;2;3' or 'cpu;0'. The given "
                                              "split is one of the candidates.")] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE,SIZE", show_default="the cluster's", help="Memory of each "
                                        "device, in the order of --devices, or one size for all.")] = "",
    batch: Annotated[int, typer.Option(metavar="N", help="Number of concurrent sequences.")] = 1,
    context: Annotated[int | None, typer.Option(metavar="N", show_default="2048, or the model's if that is less",
                                                help="Tokens of each sequence.")] = None,
    objective: Annotated[str, typer.Option(metavar="NAME", help="Rank by latency (one fast answer) or by "
                                           "throughput.")] = "latency",
    cluster: Annotated[str, typer.Option(metavar="FILE", show_default="this machine, measured once", help="Hardware: a "
                                         "TOML file, or a name from `numflow plan --clusters`.")] = "",
    shape: Annotated[str, typer.Option(metavar="NAME", show_default=False, help="Plan for a generic decoder of this "
                                       "size, such as 7b, 13b or 70b, instead of a model on disk.")] = "",
    weights: Annotated[str, typer.Option(metavar="TYPE", show_default="as stored; F16 of a --shape",
                                         help="Type of the matrices, such as F16 or Q4_0. For a model on disk also a "
                                         "scheme, a preset or a recipe file.")] = "",
    kv: Annotated[str | None, typer.Option(metavar="TYPE", show_default="16 bits; f32 with float weights on a CPU",
                                           help="Type of the KV cache: f32, f16, bf16 (CPU), q8 .. q2.")] = None,
    clusters: Annotated[bool, typer.Option("--clusters", help="List the described clusters and exit.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    spec: options.SpecFile = None,
    json: options.Json = False,
    offline: options.Offline = False,
) -> None:
    """Compare ways to split a model over devices.

    Memory and speed of every strategy (by layer, by tensor, hybrid) are predicted by simulation. The table gives the
    reason why a strategy was not chosen.
    """
    from numflow.partition.price import hardware, planner
    from numflow.partition.price.drawing import draw

    if clusters:
        print_table(("name", "what it is"), hardware.known_clusters().items())
        return
    names, backend = _names(devices), device or ("cuda" if cluster else "cpu")
    if backend not in ("cpu", "cuda"):
        raise RequestError(f"--device should be cpu or cuda, is {backend!r}")
    network = _network(model, shape, weights, spec, offline)
    sizes = _sizes(kv, network, backend)
    goal = planner.Goal(batch, _context(network, context), objective)
    found = hardware.read_cluster(cluster) if cluster else _this_machine(names, measure, backend)
    names = names or list(found.devices)
    found = _with_memory(found, names, memory)
    candidates = planner.rank(network, found, names, goal, devices or None, progress=_progress, **sizes)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if json:
        print_json({"model": network.name, "cluster": found.title, "batch": batch, "context": goal.context,
                    "objective": objective, "candidates": [_as_dict(c) for c in candidates]})
    else:
        print(f"{network.name} on {found.title}, {batch} x {goal.context} tokens, {objective}\n")
        print_table(("devices", "strategy", ">GB", ">first token s", ">tok/s, one", f">tok/s, {batch}", "verdict"),
                    [_row(c) for c in candidates])
        if candidates[0].fits and candidates[0].plan is not None:
            print("\n" + "\n".join(draw(candidates[0].plan, candidates[0].memory)))
    if not candidates[0].fits:
        raise RequestError("no strategy fits into the memory of these devices; a smaller --context, --batch, --kv or "
                           "--weights would need less")


def _this_machine(names: list[str], again: bool, backend: str):
    """This machine's GPUs, or its CPU as virtual devices. again: measure them again."""
    if backend == "cuda":
        from numflow.lab.gpus import these_gpus

        return these_gpus(names, again)
    from numflow.lab.machine import this_machine

    return this_machine(names or ["0"], again)


def _names(devices: str) -> list[str]:
    from numflow.partition.cut.devices import parse_devices

    return [device.name for device in parse_devices(devices)] if devices else []


def _context(network, context: int | None) -> int:
    """Tokens of a sequence: `context`, if the model's context is long enough, or the default."""
    longest = network.facts.get("context")
    if context is None:
        return min(2048, longest or 2048)
    if longest is not None and context > longest and "stretches" not in network.facts:
        raise RequestError(f"--context should be 1 .. {longest} tokens, as {network.name}'s, is {context}")
    return context


def _with_memory(cluster, names: list[str], memory: str):
    """The cluster with the memory sizes of --memory."""
    from dataclasses import replace

    from numflow.sizes import parse_bytes

    if not memory:
        return cluster
    sizes = [parse_bytes(size, "--memory") for size in memory.split(",")]
    if len(sizes) not in (1, len(names)):
        raise RequestError(f"--memory should be one size or {len(names)}, has {len(sizes)}")
    sizes = sizes * len(names) if len(sizes) == 1 else sizes
    given = dict(zip(names, sizes, strict=True))
    return replace(cluster, devices={name: replace(device, memory=given.get(name, device.memory))
                                     for name, device in cluster.devices.items()})


def _network(model, shape: str, weights: str, spec: str | Path | None, offline: bool):
    """The model's network, without fused matrix products."""
    from dataclasses import replace

    from numflow import formats, network, registry
    from numflow.engine.requantise import Requantising, requantised
    from numflow.formats.types import TYPES
    from numflow.quant import SCHEMES
    from numflow.registry.progress import Silent

    if shape:
        from numflow.lab.shapes import find_shape, random_network

        return replace(random_network(find_shape(shape), weights or "F16", fuse=False)[0], name=shape)
    checkpoint = formats.open_checkpoint(registry.resolve(asked_name(model, offline), offline=offline))
    chosen, stored = network.choose_spec(checkpoint, spec), weights in TYPES and weights not in SCHEMES
    if weights and not stored:  # a scheme, as in --weights of the commands that run a model
        checkpoint = requantised(checkpoint, chosen, Requantising(weights, calibration=False), None, Silent())
    built = network.build(chosen, checkpoint, fuse=False)
    if not stored:
        return built
    block = TYPES[weights].block
    return replace(built, weights={
        name: replace(weight, types=(weights,) * len(weight.types))
        if len(weight.shape) == 2 and weight.shape[1] % block == 0 else weight
        for name, weight in built.weights.items()})


def _sizes(kv: str | None, network, backend: str) -> dict:
    """Sizes of weights and KV cache as the executors store them; with "cuda" the sizes on GPUs and on the CPU."""
    from numflow.cpu import estimate as cpu
    from numflow.cuda import estimate as cuda
    from numflow.network.cost import all_floats, f32_bytes
    from numflow.partition.price.price import Holding
    from numflow.quant.kv import KV_TYPES, value_bytes

    allowed = KV_TYPES if backend == "cpu" else cuda.KV_TYPES
    if kv is not None and kv not in allowed:
        raise RequestError(f"--kv should be one of {', '.join(allowed)}, is {kv!r}")
    on_cpu, on_gpu = kv or ("f32" if all_floats(network) else "f16"), kv or "f16"
    value = on_cpu if backend == "cpu" else on_gpu
    holdings = {"cpu": Holding(cpu.weight_bytes, lambda c: cpu.cache_bytes(c, on_cpu, on_cpu), f32_bytes),
                "cuda": Holding(cuda.weight_bytes, lambda c: cuda.cache_bytes(c, on_gpu, on_gpu))}
    return {"kv_bytes": value_bytes(value), "backend": backend,
            "weigh": holdings[backend].weigh, "hold": holdings[backend].hold, "holdings": holdings}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[Kpricing {text}", end="", file=sys.stderr, flush=True)


def _row(c) -> tuple:
    if c.error:
        return (c.devices, c.strategy, "", "", "", "", c.reason)
    largest = max(memory.used for memory in c.memory.values()) / 1e9
    figures = (f"{largest:.1f}", f"{c.first:.2f}", f"{c.speed:.1f}", f"{c.throughput:.1f}")
    return (c.devices, c.strategy, *figures, c.reason)


def _as_dict(c) -> dict:
    facts = {"devices": c.devices, "strategy": c.strategy, "fits": c.fits, "reason": c.reason}
    if c.error:
        return facts
    return facts | {
        "first_token_s": c.first, "tok_s": c.speed, "tok_s_batch": c.throughput, "exchanging": c.exchanging,
        "waiting": c.waiting,
        "memory": {name: {"weights": m.weights, "kv": m.cache, "scratch": m.scratch, "limit": m.limit}
                   for name, m in c.memory.items()}}
