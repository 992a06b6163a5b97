"""Adapters: speed of batches whose requests choose among 1, 8 or 64 LoRA adapters, beside the base model alone.

Adapters have random weights and change every matrix of the layers. Rates count the tokens generated after all prompts
were processed; they are medians over rounds in which the cases take turns.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

# adapters, with commas between: 0 is the base, loaded without any.
OPTIONS = {"model": "smollm2-135m-instruct", "adapters": "0,1,8,64", "rank": 16, "sequences": 32, "prompt": 16,
           "new": 32, "rounds": 5, "threads": 0, "activations": "int8"}


def run(lab):
    import numflow
    from numflow import formats, registry

    if lab.quick:
        lab.options |= {"adapters": "0,2", "sequences": 4, "new": 4, "rounds": 1}
    options = lab.options
    path = Path(registry.resolve(options["model"]))
    options["model"] = path.name  # no paths in the report
    counts, threads = [int(n) for n in options["adapters"].split(",")], options["threads"] or None
    how = {"threads": threads, "activations": options["activations"]}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        files = [write_adapter(Path(folder) / str(n), formats.open_checkpoint(path), options["rank"], n)
                 for n in range(max(counts))]
        with numflow.load(path, **how) as base, numflow.load(
                path, **how, adapters={str(n): file for n, file in enumerate(files)}) as model:
            samples: dict[int, list[float]] = {count: [] for count in counts}
            for number in range(options["rounds"] + 1):  # the first does not count: weights come from the disk
                for count, own in samples.items():
                    lab.say(f"round {number} of {options['rounds']}: {count} adapters")
                    rate = tokens_per_second(model if count else base, count, options)
                    own += [rate] if number else []
            size = model.program.weights_bytes - base.program.weights_bytes
    load.append(os.getloadavg()[0])
    lab.results |= {"load_average": load, "adapter_mib": size / max(1, len(files)) / 2**20, "samples": samples}
    report(lab, {count: median(own) for count, own in samples.items()}, options)


def tokens_per_second(model, adapters: int, options) -> float:
    """Tokens per second of all requests together, with adapters in turn, from the time when all have a first token."""
    import numflow

    sequences, new = options["sequences"], options["new"]
    texts = np.random.default_rng(0).integers(10, model.vocabulary, (sequences, options["prompt"])).tolist()
    times: list[list[float]] = [[] for _ in texts]
    with numflow.Engine(model, sequences, prefix_cache=False) as engine:
        names = [str(n % adapters) if adapters else None for n in range(sequences)]
        requests = [engine.request(ids, max_tokens=new, ignore_eos=True, temperature=0, adapter=name)
                    for ids, name in zip(texts, names)]
        jobs = [engine.start(request, 1, 0, lambda piece, own=own: own.append(time.perf_counter()))
                for request, own in zip(requests, times)]
        for job in jobs:
            job.done.wait()
    first, end = max(own[0] for own in times), max(own[new - 1] for own in times)
    return sum(moment > first for own in times for moment in own[:new]) / (end - first)


def write_adapter(folder: Path, base, rank: int, seed: int) -> Path:
    """An adapter of the base's kind that changes every matrix of the layers."""
    from numflow import network

    built, rng = network.build(network.choose_spec(base), base, fuse=False), np.random.default_rng(seed)
    matrices = {part.tensor for step in built.entries["main"] if step.op == "linear" and step.label.startswith("blk.")
                for part in built.weights[step.weights["weight"]].parts}
    pairs = {name: [0.01 * rng.standard_normal(shape, np.float32)
                    for shape in ((rank, base.tensors[name].columns), (base.tensors[name].rows, rank))]
             for name in sorted(matrices)}
    folder.mkdir()
    (_write_gguf if base.naming == "gguf" else _write_peft)(folder, base, rank, pairs)
    return folder


def _write_gguf(folder: Path, base, rank: int, pairs) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / "adapter.gguf", base.config["general.architecture"])
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, pair in pairs.items():
        for letter, values in zip("ab", pair):
            writer.add_tensor(f"{name}.lora_{letter}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_peft(folder: Path, base, rank: int, pairs) -> None:
    from safetensors.numpy import save_file

    save_file({f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight": values
               for name, pair in pairs.items() for letter, values in zip("AB", pair)},
              folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def report(lab, rates: dict[int, float], options) -> None:
    """The table of rates, and the size of an adapter."""
    base = rates.get(0)
    rows = [["the base alone" if count == 0 else count, f"{rate:.0f}", "" if base is None else f"{rate / base:.2f}"]
            for count, rate in rates.items()]
    lab.text(f"Batches of {options['sequences']} requests, adapters of rank {options['rank']} on every matrix of the "
             f"layers: {lab.results['adapter_mib']:.1f} MiB each in memory. Load of the machine before and after: "
             f"{lab.results['load_average'][0]:.1f}, {lab.results['load_average'][1]:.1f}.")
    lab.table(["adapters", "tokens/s", "relative to the base"], rows)
    redraw(lab)


def redraw(lab):
    """The figure from results alone."""
    from numflow.lab import style

    samples = {int(count): own for count, own in lab.results["samples"].items()}
    made, axis = style.figure()
    for at, own in enumerate(samples.values()):
        axis.barh(at, median(own), color=style.SERIES[0][0], height=0.6)
        axis.plot(own, [at] * len(own), "o", color=style.SERIES[1][0], markersize=4, markeredgecolor="white",
                  markeredgewidth=0.5)
    axis.set(xlabel="tokens a second of all requests (dots: rounds)", yticks=range(len(samples)), xlim=(0, None),
             yticklabels=["base alone" if count == 0 else f"{count} adapter{'s' * (count > 1)}" for count in samples],
             ylim=(len(samples) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    most = max(samples)
    finding = f"{most} adapters in turn: {median(samples[most]):.0f} tokens a second"
    if 0 in samples:
        finding += f", {median(samples[most]) / median(samples[0]):.2f} of the base alone"
    lab.figure(made, "rates", finding, lab.options["model"], f"{lab.options['sequences']} requests", left=1.1)
